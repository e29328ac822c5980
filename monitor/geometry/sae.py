"""Sparse autoencoders: which of their features go with a concept, and the directions these features write.

Any autoencoder given as encoder, bias and decoder will do; none is bundled. Source: MAxBench, Sec. 3.1 and App. G.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from monitor.geometry.subspaces import Subspace, check_activations, check_draw, check_rank

# Names that files give to the tensors: SAELens and Gemma Scope first, then two torch.nn.Linear modules.
_NAMES = {
    "W_enc": ("W_enc", "encoder.weight"),
    "b_enc": ("b_enc", "encoder.bias"),
    "W_dec": ("W_dec", "decoder.weight"),
    "b_dec": ("b_dec", "decoder.bias", "pre_bias"),
    "threshold": ("threshold",),
}
_OPTIONAL = ("b_dec", "threshold")
# Activations of features alive at once, in numbers: 64 MB.
_MAX_ACTIVATIONS = 1 << 24


@dataclass(frozen=True, eq=False)
class SparseAutoencoder:
    """f(x) = ReLU(x W_enc + b_enc), or, with a threshold, the same value where it is above it and 0 elsewhere.

    Attributes
    ----------
    W_enc : Tensor [d, m], b_enc : Tensor [m]
        Of m features.
    W_dec : Tensor [m, d]
        Row i is the direction that feature i writes.
    b_dec : Tensor [d], optional
    threshold : Tensor [m], optional
        Of a JumpReLU.
    subtract_b_dec : bool
        Whether the encoder reads x - b_dec. Some are trained that way; the file does not say.

    Raises
    ------
    ValueError
        For shapes that do not fit, weights that are not finite, `subtract_b_dec` without a `b_dec`.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor | None = None
    threshold: Tensor | None = None
    subtract_b_dec: bool = False

    def __post_init__(self) -> None:
        if self.W_enc.ndim != 2:
            raise ValueError(f"W_enc must be [d, m]; got shape {tuple(self.W_enc.shape)}")
        d, m = self.W_enc.shape
        expected = {"b_enc": (m,), "W_dec": (m, d), "b_dec": (d,), "threshold": (m,)}
        for name in ("W_enc", *expected):
            tensor = getattr(self, name)
            if tensor is None and name in _OPTIONAL:
                continue
            if name != "W_enc" and tensor.shape != expected[name]:
                raise ValueError(
                    f"{name} must have shape {expected[name]} beside W_enc [d={d}, m={m}]; got {tuple(tensor.shape)}"
                )
            object.__setattr__(self, name, tensor.detach().to(self.W_enc.device, torch.float32))
            if not bool(torch.isfinite(getattr(self, name)).all()):
                raise ValueError(f"{name} must be finite; some entries are NaN or infinite")
        if self.subtract_b_dec and self.b_dec is None:
            raise ValueError("b_dec must be given where subtract_b_dec is set: there is nothing to subtract")

    @property
    def n_features(self) -> int:
        """m."""
        return self.W_enc.shape[1]

    @property
    def dim(self) -> int:
        """d, the width of the activations."""
        return self.W_enc.shape[0]

    def encode(self, x: Tensor) -> Tensor:
        """Activations of all features for rows x [n, d]: [n, m] float32, >= 0, 0 where a feature is inactive."""
        x = x.detach().to(self.W_enc)
        before = (x - self.b_dec if self.subtract_b_dec else x) @ self.W_enc + self.b_enc
        if self.threshold is None:
            return before.relu()
        return torch.where(before > self.threshold, before, 0.0).relu()


def load_sparse_autoencoder(
    path: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    subtract_b_dec: bool = False,
    device: str | torch.device = "cpu",
) -> SparseAutoencoder:
    """Read a sparse autoencoder from a safetensors file.

    Parameters
    ----------
    path : path
    names : mapping, optional
        From W_enc, b_enc, W_dec, b_dec or threshold to the file's own names of these tensors. Without it the usual
        names are looked for: those of SAELens and Gemma Scope, and `encoder.weight`, `encoder.bias`, `decoder.weight`.
    subtract_b_dec : bool
        See `SparseAutoencoder`.
    device : device

    Returns
    -------
    SparseAutoencoder
        In float32. Which way round a matrix lies is told from the length of b_enc; where d = m it cannot be, and
        matrices named `....weight` are taken as [out, in], as torch.nn.Linear stores them, others as they are.

    Raises
    ------
    ValueError
        For a missing tensor, an unknown key in `names`, or shapes that fit neither way round.
    FileNotFoundError
        If there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must be a safetensors file with an autoencoder; there is none at {path}")
    if unknown := sorted(set(names or {}) - set(_NAMES)):
        raise ValueError(f"names must map {', '.join(_NAMES)} to names in the file; got the keys {unknown}")
    try:
        tensors = load_file(path, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"path must be a safetensors file, and {path} is none: {error}") from error
    found = {}
    for name, usual in _NAMES.items():
        wanted = (names[name],) if names and name in names else usual
        present = next((candidate for candidate in wanted if candidate in tensors), None)
        if present is not None:
            found[name] = (present, tensors[present])
        elif name not in _OPTIONAL or (names and name in names):
            raise ValueError(
                f"the file must hold {name} as {' or '.join(wanted)}; it holds {', '.join(sorted(tensors))}. "
                f"Map it with names={{'{name}': ...}}"
            )
    m = found["b_enc"][1].numel()
    shape = tuple(found["W_enc"][1].shape)
    if len(shape) != 2 or m not in shape:
        raise ValueError(f"W_enc must be [d, m] or [m, d] with m = {m}, the length of b_enc; got shape {shape}")
    d = shape[0] if shape[1] == m else shape[1]
    parts = {name: tensor for name, (_, tensor) in found.items()}
    parts["W_enc"] = _oriented(*found["W_enc"], (d, m), "W_enc")
    parts["W_dec"] = _oriented(*found["W_dec"], (m, d), "W_dec")
    return SparseAutoencoder(**parts, subtract_b_dec=subtract_b_dec)


def _oriented(name: str, matrix: Tensor, shape: tuple[int, int], role: str) -> Tensor:
    """`matrix` as `shape`, turned round if it lies the other way."""
    as_linear = shape[0] == shape[1] and name.endswith(".weight")
    if tuple(matrix.shape) == shape and not as_linear:
        return matrix
    if tuple(matrix.shape) == shape[::-1]:
        return matrix.mT.contiguous()
    raise ValueError(f"{role} must have shape {shape} or {shape[::-1]}; {name} has {tuple(matrix.shape)}")


def feature_correlations(sae: SparseAutoencoder, x: Tensor, negatives: Tensor) -> Tensor:
    """Matthews correlation of each feature's being active with the concept's being there.

    Parameters
    ----------
    sae : SparseAutoencoder
    x, negatives : Tensor [n, d] and [m, d]
        Activations with the concept and without it.

    Returns
    -------
    Tensor [n_features], float64, on the device of the autoencoder
        -1 to 1; 1: active for the concept and for nothing else. 0 for a feature that is always or never active.

    Raises
    ------
    ValueError
        For activations of another width, not finite, or none of a kind.

    Notes
    -----
    MCC = (TP·TN - FP·FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)), 0 where the denominator is.
    """
    counts = []
    for name, rows in (("x", x), ("negatives", negatives)):
        rows = check_activations(rows, name, at_least=1)
        if rows.shape[1] != sae.dim:
            raise ValueError(f"{name} must be as wide as the autoencoder reads, {sae.dim}; got {rows.shape[1]}")
        blocks = rows.split(max(1, _MAX_ACTIVATIONS // sae.n_features))
        counts.append(torch.stack([(sae.encode(block) > 0).sum(0) for block in blocks]).sum(0).double())
    tp, fp = counts
    fn, tn = len(x) - tp, len(negatives) - fp
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)).sqrt()
    return torch.where(scale > 0, (tp * tn - fp * fn) / scale.clamp_min(1.0), 0.0)


def top_features(sae: SparseAutoencoder, x: Tensor, negatives: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` features with the highest correlation, best first, and their correlations; of equals the first."""
    check_rank(rank, min(sae.n_features, sae.dim), f"min(m, d) of {sae.n_features} features in {sae.dim} dimensions")
    correlations, order = feature_correlations(sae, x, negatives).sort(descending=True, stable=True)
    return order[:rank], correlations[:rank]


def sae_top_k(sae: SparseAutoencoder, x: Tensor, negatives: Tensor, rank: int) -> Subspace:
    """Span of the decoder directions of the features that go best with the concept: the "combination" of MAxBench.

    Parameters
    ----------
    sae : SparseAutoencoder
    x, negatives : Tensor [n, d] and [m, d]
    rank : int, 1 to min(features, d)

    Returns
    -------
    Subspace
        Offset 0. Decoder directions are not at right angles: the basis is theirs after Gram and Schmidt, best feature
        first, so that the first k columns are the result for rank k. Each column points the way its feature writes.

    Raises
    ------
    ValueError
        As `feature_correlations`; for a rank out of range, or decoder directions that are linearly dependent.
    """
    features, _ = top_features(sae, x, negatives, rank)
    q, r = torch.linalg.qr(sae.W_dec[features].double().mT)
    added = r.diagonal()
    if bool((added.abs() <= 1e-6 * sae.W_dec[features].double().norm(dim=1)).any()):
        raise ValueError(
            f"rank must be smaller: the decoder directions of the features {features.tolist()} are linearly dependent"
        )
    return Subspace(q * added.sign(), q.new_zeros(sae.dim), "sae_top_k")


def sae_directions(sae: SparseAutoencoder, x: Tensor, negatives: Tensor, rank: int) -> tuple[Subspace, ...]:
    """The same features as directions by themselves, for `sample_independently`; otherwise as `sae_top_k`."""
    features, _ = top_features(sae, x, negatives, rank)
    directions = sae.W_dec[features]
    lengths = directions.norm(dim=1, keepdim=True)
    if bool((lengths == 0).any()):
        silent = features[lengths[:, 0] == 0].tolist()
        raise ValueError(f"W_dec must have no zero rows; features {silent} write nothing")
    zero = directions.new_zeros(sae.dim)
    return tuple(Subspace(row[:, None], zero, "sae_independent") for row in directions / lengths)


def sample_independently(
    directions: Sequence[Subspace], sigmas: Sequence[float], n: int, generator: torch.Generator
) -> Tensor:
    """Points each on one direction, picked evenly at random, at a Gaussian distance of that direction's own sigma.

    Parameters
    ----------
    directions : sequence of Subspace
        Of rank 1.
    sigmas : sequence of float
        One a direction, from `monitor.geometry.sampling_scale.calibrate_sigma`.
    n : int, >= 1
    generator : torch.Generator

    Returns
    -------
    Tensor [n, d], float32

    Raises
    ------
    ValueError
        For no directions, other ranks, or another number of sigmas.
    """
    if not directions or any(direction.rank != 1 for direction in directions):
        raise ValueError(f"directions must be of rank 1, at least one; got ranks {[s.rank for s in directions]}")
    if len(sigmas) != len(directions):
        raise ValueError(f"sigmas must be one a direction, {len(directions)}; got {len(sigmas)}")
    for sigma in sigmas:
        check_draw(n, sigma, generator)
    basis = torch.stack([direction.basis[:, 0] for direction in directions])
    offsets = torch.stack([direction.offset for direction in directions])
    device = generator.device
    chosen = torch.randint(len(directions), (n,), generator=generator, device=device).to(basis.device)
    z = torch.randn(n, 1, generator=generator, device=device).to(basis.device)
    return offsets[chosen] + z * basis.new_tensor(list(sigmas))[chosen, None] * basis[chosen]
