from __future__ import annotations

import math

import pytest
from transformers import HfArgumentParser

from trainers.npo_config import NPOConfig


def _config(tmp_path, **overrides):
    return NPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **overrides)


def test_defaults(tmp_path):
    config = _config(tmp_path)
    assert (config.beta, config.retain_loss, config.alpha, config.gamma) == (0.1, "nll", 1.0, 1.0)
    assert (config.learning_rate, config.logging_steps, config.remove_unused_columns) == (1e-5, 10, False)


def test_from_the_command_line(tmp_path):
    (config,) = HfArgumentParser(NPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "true", "--beta", "0.5", "--retain_loss", "kl", "--alpha", "2"]
    )
    assert (config.beta, config.retain_loss, config.alpha, config.learning_rate) == (0.5, "kl", 2.0, 1e-5)


def test_every_own_field_has_help(tmp_path):
    HfArgumentParser(NPOConfig).format_help()
    fields = NPOConfig.__dataclass_fields__
    for name in ("beta", "retain_loss", "alpha", "gamma", "max_length", "disable_dropout", "reference_max_bytes"):
        assert fields[name].metadata["help"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"beta": 0}, "`beta` must be a number > 0, got 0"),
        ({"beta": math.inf}, "`beta`"),
        ({"retain_loss": "nlll"}, "`retain_loss` must be one of nll, kl, none, got 'nlll'"),
        ({"alpha": -1}, "`alpha` must be a number >= 0, got -1"),
        ({"gamma": math.nan}, "`gamma`"),
        ({"max_length": 1}, "`max_length` must be at least 2"),
        ({"reference_max_bytes": -1}, "`reference_max_bytes`"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` must be False"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0"),
        ({"train_sampling_strategy": "group_by_length"}, "`train_sampling_strategy` must be"),
    ],
)
def test_bad_values(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, **overrides)
