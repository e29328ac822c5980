"""The main job on the embedded default: SmolLM2-135M forgets Harry Potter while latentwatch looks on.

    latentwatch demo
    latentwatch demo --max_steps 10 --output_dir somewhere/else

It is `latentwatch unlearn` with recipes/configs/demo.yaml; any of its arguments can be overridden.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from recipes import unlearn


def main(argv: list[str] | None = None) -> None:
    import sys

    argv = list(sys.argv[1:] if argv is None else argv)
    if "--config" in argv:
        raise ValueError("`latentwatch demo` brings its own config; use `latentwatch unlearn --config` for yours.")
    with as_file(files("recipes") / "configs" / "demo.yaml") as config:
        unlearn.main(["--config", str(config), *argv])


if __name__ == "__main__":
    main()
