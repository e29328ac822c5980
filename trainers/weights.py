"""Linear merges and task-vector negation, on full weights and on LoRA adapters.

Nothing here reads a file, needs a model or trains. Mappings are read one tensor at a time, so a mapping that loads its
tensors when asked keeps no more than the result in memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

PREFIX = "base_model.model."  # what PEFT writes before a module's name
FACTOR = re.compile(rf"^(?:{re.escape(PREFIX)})?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight$")
# Which modules carry an adapter; the same selection on the same base is the same set of modules.
SELECTION = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# The options under which an adapter adds scaling * B A and nothing else. Any other one in use is refused by its name.
PLAIN_OPTIONS = {
    *SELECTION,
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("fan_in_fan_out", "bias", "modules_to_save", "init_lora_weights", "eva_config"),
    *("qalora_group_size", "megatron_core"),  # have a value when the option they belong to is off
}
# Initialisations that leave the base's weights as they are. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA do not.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter as PEFT saves it.

    Attributes
    ----------
    config : mapping
        The content of ``adapter_config.json``.
    tensors : mapping of str to Tensor
        The content of ``adapter_model.safetensors``.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def linear_merge(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], ratio: float, *, labels: tuple[str, str] = ("a", "b")
) -> dict[str, Tensor]:
    r"""Weights on the straight line from a to b: :math:`(1 - t)\,\theta_a + t\,\theta_b`.

    Wortsman et al. (arXiv 2109.01903, WiSE-FT), there between a zero-shot and a fine-tuned model.

    Parameters
    ----------
    a, b : mapping of str to Tensor
        State dicts of one architecture: the same names, shapes and dtypes.
    ratio : float
        t, the share of b, in [0, 1].
    labels : pair of str
        What errors call the two.

    Returns
    -------
    dict of str to Tensor
        New tensors in the order, dtypes and devices of a. Computed in float32 (float64 for float64 weights) and
        rounded once. Ratio 0 is bit-equal to a, ratio 1 to b; a merge of a with itself is a. Integer and boolean
        tensors are a's.

    Raises
    ------
    ValueError
        When `ratio` is outside [0, 1]; when names, shapes or dtypes differ; when integer or boolean tensors differ, of
        which there is no mean; when a dtype is quantised (float8 and the like), whose numbers are no weights without
        their scales.
    """
    return _line(a, b, check_ratio(ratio), labels)


def task_vector_negation(
    base: Mapping[str, Tensor],
    finetuned: Mapping[str, Tensor],
    scale: float,
    *,
    labels: tuple[str, str] = ("base", "finetuned"),
) -> dict[str, Tensor]:
    r"""The base moved away from the fine-tuned weights: :math:`\theta_{base} - \lambda(\theta_{ft} - \theta_{base})`.

    Ilharco et al. (arXiv 2212.04089, section 3): the task vector is what fine-tuning added, and subtracting it from
    the base makes the base forget the task. To forget a set of texts, fine-tune the base on them first.

    Parameters
    ----------
    base, finetuned : mapping of str to Tensor
        As in `linear_merge`.
    scale : float
        :math:`\lambda`, finite. Positive forgets, 0 is bit-equal to the base, -1 to the fine-tuned weights.
    labels : pair of str
        What errors call the two.

    Returns
    -------
    dict of str to Tensor
        As of `linear_merge`.

    Raises
    ------
    ValueError
        When `scale` is not finite, and as `linear_merge`.
    """
    return _line(base, finetuned, -check_scale(scale), labels)


def lora_linear_merge(
    a: LoraAdapter, b: LoraAdapter, ratio: float, *, labels: tuple[str, str] = ("a", "b")
) -> LoraAdapter:
    r"""The adapter whose update is :math:`(1 - t)\,\Delta W_a + t\,\Delta W_b` in every module.

    An adapter's update is :math:`\Delta W = s B A`, so the weighted sum of two is one product of stacked factors,

    .. math:: \Delta W = [(1 - t) s_a B_a,\; t s_b B_b] \begin{bmatrix} A_a \\ A_b \end{bmatrix},

    of rank :math:`r_a + r_b` and scaling 1 (``lora_alpha = r``). Averaging A and B each by itself is something else:
    :math:`((1-t) B_a + t B_b)((1-t) A_a + t A_b)` has the cross terms :math:`t(1-t)(B_a A_b + B_b A_a)`, and only
    :math:`(1-t)^2` and :math:`t^2` of the updates themselves; it is not even defined for two ranks.

    Parameters
    ----------
    a, b : LoraAdapter
        Of one base model. Ranks, alphas, rsLoRA, rank and alpha patterns and modules may differ; a module that only
        one of them has gets that one's share.
    ratio : float
        t, the share of b, in [0, 1].
    labels : pair of str
        What errors call the two.

    Returns
    -------
    LoraAdapter
        In the wider dtype of the two, module by module; B is rounded to it once, after its scaling, and A is not
        touched. At ratio 0 a itself, at ratio 1 b itself, factors and config
        unchanged. Whole weights that adapters also hold (`modules_to_save`, trained biases, resized embeddings) are
        merged as in `linear_merge`.

    Raises
    ------
    ValueError
        When `ratio` is outside [0, 1]; when the adapters are of different bases; when whole weights are in one only,
        since the other's are the base's, which an adapter does not hold; for adapters that are no plain
        :math:`s B A` on the base as it is: DoRA, trained biases of B (`lora_bias`), embeddings, trained tokens,
        `target_parameters`, initialisations that change the base, and methods other than LoRA.
    """
    ratio = check_ratio(ratio)
    plain_a, plain_b = _Plain.of(a, labels[0]), _Plain.of(b, labels[1])
    _check_same_base(a, b)
    whole = _whole_line(plain_a, plain_b, ratio, labels)  # also at the endpoints: what is refused does not depend
    if ratio in (0, 1):
        return a if ratio == 0 else b
    return _stack(a, b, (plain_a, 1 - ratio), (plain_b, ratio), whole)


def lora_task_vector_negation(
    finetuned: LoraAdapter,
    scale: float,
    base: LoraAdapter | None = None,
    *,
    labels: tuple[str, str] = ("base", "finetuned"),
) -> LoraAdapter:
    r"""`task_vector_negation` for adapters.

    Without `base` the task vector is the adapter's whole update, and its negation :math:`-\lambda s B A` is the same
    adapter with B replaced by :math:`-\lambda B`. With `base`, an adapter that was trained further into `finetuned`,
    it is :math:`(1 + \lambda)\,\Delta W_{base} - \lambda\,\Delta W_{ft}`, by stacking as in `lora_linear_merge`.

    Parameters
    ----------
    finetuned : LoraAdapter
    scale : float
        :math:`\lambda`, finite; positive forgets. 0 gives the base, -1 the fine-tuned adapter.
    base : LoraAdapter, optional
    labels : pair of str
        What errors call the base and the fine-tuned adapter.

    Raises
    ------
    ValueError
        As `lora_linear_merge`; also, without `base`, when the adapter holds whole weights, whose negation needs those
        of the base model.
    """
    scale = check_scale(scale)
    plain = _Plain.of(finetuned, labels[1])
    if base is None:
        if plain.whole:
            raise ValueError(
                f"adapter `{labels[1]}` also holds whole weights ({_some(plain.whole)}): their negation needs those of "
                "the base model. Merge the adapter into its base (peft's merge_and_unload) and negate full weights."
            )
        tensors = {
            name: _scaled(tensor, -scale) if FACTOR.match(name)["factor"] == "B" else tensor.clone()
            for name, tensor in finetuned.tensors.items()
        }
        return LoraAdapter(dict(finetuned.config), tensors)
    plain_base = _Plain.of(base, labels[0])
    _check_same_base(base, finetuned)
    whole = _whole_line(plain_base, plain, -scale, labels)
    if scale in (0, -1):
        return base if scale == 0 else finetuned
    return _stack(base, finetuned, (plain_base, 1 + scale), (plain, -scale), whole)


def check_ratio(ratio: float) -> float:
    """The ratio, if it is one."""
    if not 0 <= ratio <= 1:
        raise ValueError(
            f"`ratio` is the share of the second model, between 0 and 1; got {ratio}. To go beyond the first model, "
            "away from the second, use task-vector negation."
        )
    return float(ratio)


def check_scale(scale: float) -> float:
    """The scale, if it is one."""
    if not math.isfinite(scale):
        raise ValueError(f"`scale` must be a finite number, got {scale}.")
    return float(scale)


def check_same_layout(a: Mapping[str, tuple], b: Mapping[str, tuple], labels: tuple[str, str] = ("a", "b")) -> None:
    """Raise ValueError unless two state dicts, given as name -> (shape, dtype), could be merged."""
    if set(a) != set(b):
        here, there = (_some(set(x) - set(y)) or "nothing" for x, y in ((a, b), (b, a)))
        raise ValueError(
            f"the weights have different names: only in `{labels[0]}`: {here}; only in `{labels[1]}`: {there}. Merge "
            "two models of one architecture, saved in the same way (tied or untied heads included)."
        )
    for name in a:
        for what, x, y in zip(("shape", "dtype"), a[name], b[name], strict=True):
            if x != y:
                hint = "Save both in one dtype." if what == "dtype" else "Merge two models of one architecture."
                raise ValueError(
                    f"{name} has {what} {_text(x)} in `{labels[0]}` and {_text(y)} in `{labels[1]}`. {hint}"
                )


def _line(a: Mapping[str, Tensor], b: Mapping[str, Tensor], t: float, labels: tuple[str, str]) -> dict[str, Tensor]:
    if set(a) != set(b):
        check_same_layout(dict.fromkeys(a, ()), dict.fromkeys(b, ()), labels)
    merged = {}
    for name in a:
        x, y = a[name], b[name]
        check_same_layout({name: (tuple(x.shape), x.dtype)}, {name: (tuple(y.shape), y.dtype)}, labels)
        merged[name] = _between(name, x, y.to(x.device), t, labels)
    return merged


def _between(name: str, a: Tensor, b: Tensor, t: float, labels: tuple[str, str]) -> Tensor:
    """a + t (b - a), rounded once, where t may lie outside [0, 1]."""
    if a.dtype not in FLOATS:
        if a.dtype.is_floating_point or a.dtype.is_complex:
            raise ValueError(f"{name} is {_text(a.dtype)}: expected float16, bfloat16, float32 or float64 weights.")
        if not torch.equal(a, b):
            raise ValueError(
                f"{name} ({_text(a.dtype)}) differs between `{labels[0]}` and `{labels[1]}`, and there is no mean of "
                "integers: expected equal buffers. Quantised weights must be dequantised and saved first."
            )
        return a.clone()
    if t in (0, 1):  # as they are: signs of zeros and non-finite values included
        return (a if t == 0 else b).clone()
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.lerp(a.to(wide), b.to(wide), t).to(a.dtype)


def _scaled(tensor: Tensor, weight: float) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * weight).to(tensor.dtype)


@dataclass(frozen=True)
class _Plain:
    """An adapter taken apart: per module its A [r, in], B [out, r] and scaling; and the whole weights beside them."""

    factors: dict[str, tuple[Tensor, Tensor, float]]
    whole: dict[str, Tensor]

    @classmethod
    def of(cls, adapter: LoraAdapter, label: str) -> _Plain:
        _check_options(adapter.config, label)
        found: dict[str, dict[str, Tensor]] = {}
        whole = {}
        for name, tensor in adapter.tensors.items():
            if match := FACTOR.match(name):
                found.setdefault(match["module"], {})[match["factor"]] = tensor
            elif "lora_" in name:
                raise ValueError(
                    f"adapter `{label}` holds {name}: only the factors lora_A and lora_B of linear layers can be "
                    "merged as an adapter. Merge it into its base (peft's merge_and_unload) and merge full weights."
                )
            else:
                whole[name] = tensor
        if not found:
            raise ValueError(f"adapter `{label}` holds no LoRA factors: expected tensors named *.lora_A.weight.")
        factors = {}
        for module, pair in found.items():
            r, scaling = _rank_and_scaling(adapter.config, module)
            shapes = {factor: tuple(tensor.shape) for factor, tensor in pair.items()}
            if set(pair) != {"A", "B"} or not shapes["A"][0] == shapes["B"][1] == r:
                raise ValueError(
                    f"adapter `{label}`, module {module}: expected lora_A [{r}, in] and lora_B [out, {r}] as its "
                    f"config says, got {', '.join(f'lora_{f} {list(s)}' for f, s in sorted(shapes.items()))}. Save it "
                    "again with save_pretrained."
                )
            if unusual := [t.dtype for t in pair.values() if t.dtype not in FLOATS]:
                raise ValueError(f"adapter `{label}`, module {module}: {_text(unusual[0])} factors; save it in floats.")
            factors[module] = (pair["A"], pair["B"], scaling)
        return cls(factors, whole)


def _check_options(config: Mapping[str, Any], label: str) -> None:
    advice = "Merge it into its base (peft's merge_and_unload, then save_pretrained) and merge full weights."
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise ValueError(f"adapter `{label}` is of type {config.get('peft_type')!r}, expected 'LORA'. {advice}")
    # "Off" is None, False or empty.
    if used := sorted(name for name, value in config.items() if value and name not in PLAIN_OPTIONS):
        raise ValueError(
            f"adapter `{label}` uses {', '.join(used)}: its update is not scaling * B A alone, and it cannot be merged "
            f"as an adapter. {advice}"
        )
    if config.get("init_lora_weights", True) not in PLAIN_INITS:
        raise ValueError(
            f"adapter `{label}` was initialised by {config['init_lora_weights']!r}, which changes the base's weights, "
            "so it is an adapter of another base. Convert it to plain LoRA first (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )


def _rank_and_scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """A module's rank and scaling by PEFT's rules: the first pattern that ends its name, else the default."""

    def first(patterns: Mapping | None, default: float) -> float:
        matching = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matching, default)

    r = first(config.get("rank_pattern"), config["r"])
    alpha = first(config.get("alpha_pattern"), config["lora_alpha"])
    return int(r), alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _check_same_base(a: LoraAdapter, b: LoraAdapter) -> None:
    for key in ("base_model_name_or_path", "revision", "task_type", "fan_in_fan_out", "bias"):
        # "none" and "main" are what PEFT and the Hub read where nothing is written.
        x, y = (adapter.config.get(key) or {"bias": "none", "revision": "main"}.get(key) for adapter in (a, b))
        if (x or None) != (y or None):
            raise ValueError(
                f"the adapters differ in `{key}`: {x!r} and {y!r}. Merge two adapters of one base model. If it is one "
                "model under two names, write one of them into both adapter_config.json."
            )


def _whole_line(a: _Plain, b: _Plain, t: float, labels: tuple[str, str]) -> dict[str, Tensor]:
    if alone := set(a.whole) ^ set(b.whole):
        raise ValueError(
            f"one adapter alone also holds whole weights ({_some(alone)}), and the other's share of them is the base "
            "model's, which an adapter does not hold. Merge both into their base (peft's merge_and_unload) and merge "
            "full weights."
        )
    return _line(a.whole, b.whole, t, labels)


def _stack(
    a: LoraAdapter, b: LoraAdapter, first: tuple[_Plain, float], second: tuple[_Plain, float], whole: dict[str, Tensor]
) -> LoraAdapter:
    """The adapter that adds the weighted sum of two updates."""
    stacked_a: dict[str, list[Tensor]] = {}
    stacked_b: dict[str, list[Tensor]] = {}
    for plain, weight in (first, second):
        for module, (factor_a, factor_b, scaling) in plain.factors.items():
            stacked_a.setdefault(module, []).append(factor_a)
            stacked_b.setdefault(module, []).append(_scaled(factor_b, weight * scaling))
    tensors = {}
    for module, parts in stacked_a.items():
        device = parts[0].device
        for factor, pieces, dim in (("A", parts, 0), ("B", stacked_b[module], 1)):
            sizes = {piece.shape[1 - dim] for piece in pieces}
            if len(sizes) > 1:
                raise ValueError(
                    f"module {module}: lora_{factor} is for layers of {' and '.join(map(str, sorted(sizes)))} features "
                    "in the two adapters. Merge two adapters of one base model."
                )
            tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = torch.cat([piece.to(device) for piece in pieces], dim)
    ranks = {module: sum(part.shape[0] for part in parts) for module, parts in stacked_a.items()}
    same_modules = set(first[0].factors) == set(second[0].factors)
    return LoraAdapter(_stacked_config(a.config, b.config, ranks, same_modules), tensors | whole)


def _stacked_config(
    a: Mapping[str, Any], b: Mapping[str, Any], ranks: Mapping[str, int], same_modules: bool
) -> dict[str, Any]:
    """A config with scaling 1 in every module: alpha is r, by default and in the patterns."""
    r = Counter(ranks.values()).most_common(1)[0][0]
    # Anchored, since PEFT lets a pattern match any module whose name ends so.
    pattern = {f"^{re.escape(module)}": rank for module, rank in ranks.items() if rank != r}
    config = dict(a) | {"r": r, "lora_alpha": r, "rank_pattern": pattern, "alpha_pattern": dict(pattern)}
    config |= {"use_rslora": False, "init_lora_weights": True, "eva_config": None, "inference_mode": True}
    if not same_modules or any(_as_set(a.get(key)) != _as_set(b.get(key)) for key in SELECTION):
        config |= dict.fromkeys(SELECTION) | {"target_modules": sorted(ranks)}
    return config


def _as_set(value: Any) -> Any:
    return frozenset(value) if isinstance(value, (list, tuple, set)) else value


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
