"""Every method has its name, its configs and its way through the command."""

from pathlib import Path

import pytest
import yaml

from recipes import unlearn
from recipes.methods import DEFAULT, METHODS, method_name

CONFIGS = Path(unlearn.__file__).parent / "configs"


def test_the_method_is_named_on_the_command_line_or_in_the_config(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("method: rmu\n")
    assert method_name([]) == DEFAULT
    assert method_name(["--method", "dpo"]) == method_name(["--method=dpo"]) == "dpo"
    assert method_name(["--config", str(config)]) == "rmu"
    assert method_name(["--config", str(config), "--method", "whp"]) == "whp"  # the command line overrides
    config.write_text("beta: 1\n")
    assert method_name([f"--config={config}"]) == DEFAULT
    with pytest.raises(ValueError, match="`method` must be one of gradient_ascent.*, got 'nop'"):
        method_name(["--method", "nop"])
    config.write_text("method: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        method_name(["--config", str(config)])


@pytest.mark.parametrize("folder", [".", "smollm2"])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_config_that_parses_and_opens_with_its_launch_command(method, folder):
    path = CONFIGS / folder / f"{method}.yaml"
    shown = path.relative_to(CONFIGS.parent.parent).as_posix()
    assert path.read_text().startswith(f"# latentwatch unlearn --config {shown}\n")
    # bf16 is refused where there is no GPU.
    arguments, training, model, *_ = unlearn.parse_arguments(["--config", str(path), "--use_cpu", "true"])
    assert arguments.method == method
    assert type(training) is METHODS[method].config_class
    assert training.output_dir == f"runs/{method}" and model.model_name_or_path
    # What YAML names is what is set: nothing is passed over.
    for name, value in yaml.safe_load(path.read_text()).items():
        owners = [part for part in (arguments, training, model, *_) if hasattr(part, name)]
        assert owners, name
        if name not in ("eval_strategy", "save_strategy", "lr_scheduler_type", "dtype", "report_to"):
            assert getattr(owners[0], name) == value, name
