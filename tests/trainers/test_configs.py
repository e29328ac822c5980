"""The arguments of every method: defaults of the papers, the command line, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from transformers import HfArgumentParser, TrainingArguments

DEFAULTS = {
    "gradient_ascent": {"retain_loss": "none", "alpha": 1.0, "gamma": 1.0},
    "grad_diff": {"retain_loss": "nll", "alpha": 1.0, "gamma": 1.0},
    "kl_min": {"retain_loss": "kl", "alpha": 1.0, "gamma": 1.0},
    "npo": {"retain_loss": "nll", "beta": 0.1},
    "simnpo": {"retain_loss": "nll", "beta": 4.5, "delta": 0.0},
    "dpo": {"retain_loss": "nll", "beta": 0.1, "chosen": "refusal"},
    "rmu": {"layer": 0.25, "coefficient": 20.0, "adaptive_scale": None, "alpha": 1200.0, "trained_layers": None},
    "whp": {"retain_loss": "nll"},
    "whp_reinforced": {"retain_loss": "nll", "reinforcement": 5.0},
    "wga": {"retain_loss": "nll", "beta": 1.0},
    "satimp": {"retain_loss": "nll", "beta1": 5.0, "beta2": 1.0},
    "undial": {"retain_loss": "none", "strength": 10.0},
    "ce_u": {"retain_loss": "none"},
    "fine_tuning": {},
    "task_vector": {"scale": 1.0},
}


@pytest.fixture
def config(methods, tmp_path):
    def config(name, **overrides):
        return methods[name].config(output_dir=str(tmp_path), use_cpu=True, report_to="none", **overrides)

    return config


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(config, name):
    found = config(name)
    assert {key: getattr(found, key) for key in DEFAULTS[name]} == DEFAULTS[name]


def test_from_the_command_line(method, tmp_path):
    """Every own field has help, and the parser gives the types of the defaults."""
    own = [f for f in fields(method.config) if f.name not in {g.name for g in fields(TrainingArguments)}]
    assert all(f.metadata.get("help") for f in own)
    HfArgumentParser(method.config).format_help()
    line = ["--output_dir", str(tmp_path), "--use_cpu", "true"]
    given = {
        name: value
        for name, value in {"beta": 0.25, "alpha": 0.5, "retain_loss": "kl", "layer": 2.0, "scale": 0.5}.items()
        if name in {f.name for f in own}
    }
    for name, value in given.items():
        line += [f"--{name}", str(value)]
    if method.name == "rmu":
        line += ["--trained_layers", "0", "1", "--trained_parameters", "down_proj"]
        given |= {"trained_layers": [0, 1], "trained_parameters": ["down_proj"]}
    (found,) = HfArgumentParser(method.config).parse_args_into_dataclasses(line)
    assert {name: getattr(found, name) for name in given} == given


NOT_A_NUMBER = (math.nan, math.inf, "1", None, True)
BAD = {
    "npo": {"beta": (0, -1, *NOT_A_NUMBER)},
    "simnpo": {"beta": (0, -1, *NOT_A_NUMBER), "delta": NOT_A_NUMBER},
    "dpo": {"beta": (0, -1, *NOT_A_NUMBER), "chosen": ("refusals", None)},
    "rmu": {
        "layer": (0, -1, 1.5, *NOT_A_NUMBER),
        "coefficient": (0, -1, *NOT_A_NUMBER),
        "adaptive_scale": (0, -1, math.nan, "1", True),
        "alpha": (-1, *NOT_A_NUMBER),
        "trained_layers": (1, "1", [], [1.0], [True], ["1"]),
        "trained_parameters": ("down_proj", [], [1]),
    },
    "whp_reinforced": {"reinforcement": (-1, *NOT_A_NUMBER)},
    "wga": {"beta": (-1, *NOT_A_NUMBER)},
    "satimp": {"beta1": (-1, *NOT_A_NUMBER), "beta2": (-1, *NOT_A_NUMBER)},
    "undial": {"strength": (-1, *NOT_A_NUMBER)},
    "task_vector": {"scale": (-1, *NOT_A_NUMBER)},
}


def test_bad_values(config, methods):
    for name, method in methods.items():
        bad = dict(BAD.get(name, {}))
        if method.has_retain_loss:
            bad |= {"alpha": (-1, *NOT_A_NUMBER), "gamma": (-1, *NOT_A_NUMBER), "retain_loss": ("mse", None)}
        own = {f.name for f in fields(method.config)} - {f.name for f in fields(methods["fine_tuning"].config)}
        assert own == set(bad), name
        for key, values in bad.items():
            for value in values:
                with pytest.raises(ValueError, match=f"`{key}` must be"):
                    config(name, **{key: value})


@pytest.mark.parametrize("settings", [{"retain_loss": "none"}, {"alpha": 0.0}, {"retain_loss": "kl", "alpha": 0}])
def test_weights_that_leave_nothing_to_train_on(config, settings):
    with pytest.raises(ValueError, match="`gamma` is 0 and there is no retain term.*nothing would be trained"):
        config("grad_diff", gamma=0.0, **settings)
    config("grad_diff", **settings)


def test_the_config_of_another_method_is_refused(make_trainer, methods, config, method):
    for other in ("npo", "fine_tuning", "rmu"):
        if not issubclass(methods[other].config, method.config):
            with pytest.raises(ValueError, match=f"`args` must be of {method.config.__name__}, got"):
                make_trainer(method._replace(trainer=_With(method.trainer, config(other))))


class _With:
    """A trainer class given other arguments than its own."""

    def __init__(self, trainer, args) -> None:
        self.trainer, self.args, self.config_class = trainer, args, trainer.config_class

    def __call__(self, model, args, **kwargs):
        return self.trainer(model, self.args, **kwargs)
