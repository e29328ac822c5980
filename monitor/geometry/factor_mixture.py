"""Mixture of factor analysers: activation space as a set of affine subspaces, one of which may be a concept's.

x comes from component j with probability w_j, and then x = m_j + L_j z + e, z ~ N(0, I_k), e ~ N(0, Psi) with one
diagonal Psi for all components (Ghahramani and Hinton, CRG-TR-96-1; MAxBench, Sec. 3.1 and App. B). No labels are used
to fit; labels only choose a component afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from monitor.geometry.subspaces import Subspace, check_activations, check_rank, leading_directions

# Latent means alive at once, in numbers: 64 MB.
_MAX_LATENTS = 1 << 23
# Smallest noise variance, against the mean variance of the coordinates.
_NOISE_FLOOR = 1e-6
# A component with less than this many rows, by its responsibilities, keeps its place.
_EMPTY = 1e-6


@dataclass(frozen=True, eq=False)
class MixtureOfFactorAnalysers:
    """K Gaussians with covariances L_j L_jᵀ + Psi.

    Attributes
    ----------
    weights : Tensor [K], float64
        Adding up to 1.
    means : Tensor [K, d], loadings : Tensor [K, d, k], float64
    noise : Tensor [d], float64
        Diagonal of Psi, shared.
    trace : tuple of float
        Mean log-likelihood of the rows it was fitted to, before each step and after the last; never falling.
    """

    weights: Tensor
    means: Tensor
    loadings: Tensor
    noise: Tensor
    trace: tuple[float, ...] = ()

    def log_likelihood(self, x: Tensor) -> Tensor:
        """ln p(x) of rows x [n, d], [n] float64, in nats."""
        return torch.cat([log_joint.logsumexp(1) for _, log_joint, _ in self._expected(x)])

    def responsibilities(self, x: Tensor) -> Tensor:
        """P(component | x) of rows x [n, d], [n, K] float64; rows add up to 1."""
        return torch.cat([log_joint.softmax(1) for _, log_joint, _ in self._expected(x)])

    def component_for(self, positives: Tensor, negatives: Tensor) -> Subspace:
        """The component that goes best with a concept.

        Parameters
        ----------
        positives, negatives : Tensor [n, d] and [m, d]

        Returns
        -------
        Subspace
            Offset m_j; the span of L_j, its principal directions by falling size. j has the largest

                s_j = mean of P(j | x) over positives - mean over negatives

            (MAxBench, App. B), in [-1, 1].

        Raises
        ------
        ValueError
            For activations of another width or not finite, or loadings of the chosen component that span fewer
            directions than there are factors.
        """
        scores = self.component_scores(positives, negatives)
        j = int(scores.argmax())
        directions = leading_directions(self.loadings[j].mT, self.loadings.shape[2], f"the loadings of component {j}")
        return Subspace(directions, self.means[j], "mixture_of_factor_analysers")

    def component_scores(self, positives: Tensor, negatives: Tensor) -> Tensor:
        """s_j of `component_for`, [K] float64."""
        positives, negatives = self._rows(positives, "positives"), self._rows(negatives, "negatives")
        return self.responsibilities(positives).mean(0) - self.responsibilities(negatives).mean(0)

    def _rows(self, x: Tensor, name: str = "x") -> Tensor:
        x = check_activations(x, name, at_least=1)
        if x.shape[1] != self.means.shape[1]:
            raise ValueError(f"{name} must be as wide as the components, {self.means.shape[1]}; got {x.shape[1]}")
        return x

    def _expected(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of rows with ln p(x, j) [n, K] and E[z | x, j] [K, n, k].

        By Woodbury, with A = Psi^(-1/2) L and M = I + AᵀA (k x k): the covariance C = L Lᵀ + Psi has

            C⁻¹ = Psi⁻¹ - Psi⁻¹ L M⁻¹ Lᵀ Psi⁻¹,  ln det C = ln det Psi + ln det M,
            E[z | x] = M⁻¹ Aᵀ Psi^(-1/2) (x - m).

        No d x d matrix is made.
        """
        x = self._rows(x)
        n_components, d, rank = self.loadings.shape
        root = self.noise.sqrt()
        a = self.loadings / root[:, None]  # [K, d, k]
        centres = self.means / root
        factor = self._latent_factor()
        log_det = self.noise.log().sum() + 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = self.weights.log() - (log_det + d * math.log(2 * math.pi)) / 2
        shift = (centres[:, None] @ a)[:, 0]  # Aᵀ of the whitened means, [K, k]
        for block in x.split(max(1, _MAX_LATENTS // (n_components * (rank + 1)))):
            y = block / root
            projected = y @ a - shift[:, None]  # [K, n, k]
            latent = torch.cholesky_solve(projected.mT, factor).mT
            # Products rather than differences: n x K x d would not fit, and rows are centred and of unit size.
            squared = y.square().sum(1, keepdim=True) - 2 * y @ centres.mT + centres.square().sum(1)
            mahalanobis = squared - (projected * latent).sum(-1).mT
            yield block, constant - mahalanobis / 2, latent

    def _latent_factor(self) -> Tensor:
        """Cholesky factors of M = I + Lᵀ Psi⁻¹ L, [K, k, k]."""
        a = self.loadings / self.noise.sqrt()[:, None]
        return torch.linalg.cholesky(a.mT @ a + torch.eye(a.shape[2], dtype=a.dtype, device=a.device))


def mixture_of_factor_analysers(
    x: Tensor,
    n_components: int,
    rank: int,
    seed: int = 0,
    *,
    max_iterations: int = 200,
    tolerance: float = 1e-5,
) -> MixtureOfFactorAnalysers:
    """Fit a mixture of factor analysers by expectation and maximisation.

    Parameters
    ----------
    x : Tensor [n, d]
        Activations of any texts, without labels.
    n_components : int, 1 to n
    rank : int, 1 to min(n - 1, d)
        Factors of each component.
    seed : int
        Of the k-means it starts from (scikit-learn's, best of three) and of small random loadings where a cluster has
        too few rows.
    max_iterations : int, >= 1
    tolerance : float, >= 0
        Stops when a step raises the mean log-likelihood by less, in nats a row and dimension.

    Returns
    -------
    MixtureOfFactorAnalysers
        On the device of x.

    Raises
    ------
    ValueError
        For x of another shape, not finite or constant, or numbers out of range.

    Notes
    -----
    The exact steps of Ghahramani and Hinton for means and loadings together, so that the likelihood never falls. Noise
    is kept above 1e-6 of the mean variance, which is the constrained maximum and keeps that, too.
    """
    rows = check_activations(x)
    n, d = rows.shape
    if not 1 <= n_components <= n:
        raise ValueError(f"n_components must be from 1 to {n}, the rows of x; got {n_components}")
    check_rank(rank, min(n - 1, d), f"min(n - 1, d) of x [{n}, {d}]")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1; got {max_iterations}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0; got {tolerance}")
    mean = rows.mean(0)
    size = (rows - mean).square().mean().sqrt()
    if size <= 1e-12 * rows.abs().max():
        raise ValueError("x must vary over its rows; all are equal")
    rows = (rows - mean) / size
    mixture = _initial(rows, n_components, rank, seed)
    trace: list[float] = []
    for step in range(max_iterations + 1):
        following, total = _step(mixture, rows)
        trace.append(float(total) / n)
        if step == max_iterations or (step > 0 and trace[-1] - trace[-2] < tolerance * d):
            break
        mixture = following
    in_units = tuple(value - d * math.log(float(size)) for value in trace)
    return MixtureOfFactorAnalysers(
        mixture.weights, mixture.means * size + mean, mixture.loadings * size, mixture.noise * size**2, in_units
    )


def _initial(rows: Tensor, n_components: int, rank: int, seed: int) -> MixtureOfFactorAnalysers:
    """Clusters of k-means, their principal directions, and the noise that these leave."""
    d = rows.shape[1]
    clusters = KMeans(n_components, n_init=3, random_state=seed).fit(rows.cpu().numpy())
    member = torch.from_numpy(clusters.labels_).long().to(rows.device)
    means = torch.from_numpy(clusters.cluster_centers_).to(rows)
    counts = torch.bincount(member, minlength=n_components)
    generator = torch.Generator().manual_seed(seed)
    # Without a start in it EM never uses a factor: loadings of zero stay zero.
    loadings = 1e-2 * torch.randn(n_components, d, rank, generator=generator, dtype=rows.dtype).to(rows.device)
    left = torch.zeros(d, dtype=rows.dtype, device=rows.device)
    for j, count in enumerate(counts.tolist()):
        centred = rows[member == j] - means[j]
        kept = min(rank, count - 1)
        if kept > 0:
            _, values, directions = torch.linalg.svd(centred, full_matrices=False)
            loadings[j, :, :kept] = directions[:kept].mT * values[:kept].clamp_min(1e-3) / math.sqrt(count)
            centred = centred - centred @ directions[:kept].mT @ directions[:kept]
        left += centred.square().sum(0)
    # With hardly more rows than factors next to nothing is left; a start at a hundredth of the variance can shrink.
    noise = (left / len(rows)).clamp_min(1e-2)
    return MixtureOfFactorAnalysers(counts.to(rows) / len(rows), means, loadings, noise)


def _step(mixture: MixtureOfFactorAnalysers, rows: Tensor) -> tuple[MixtureOfFactorAnalysers, Tensor]:
    """The mixture after one step of EM, and the log-likelihood of the rows before it.

    With zt = (z, 1) and r the responsibilities, the joint loadings of component j, (L_j, m_j), are
    (Σ r x zt^T)(Σ r E[zt zt^T])⁻¹, and Psi the diagonal of 1/n Σ_j Σ r (x - (L_j, m_j) zt) xᵀ.
    """
    n_components, d, rank = mixture.loadings.shape
    covariance = torch.cholesky_inverse(mixture._latent_factor())  # of z given x, [K, k, k]
    counts = rows.new_zeros(n_components)
    with_rows = rows.new_zeros(n_components, rank + 1, d)  # Σ r zt xᵀ
    latents = rows.new_zeros(n_components, rank + 1, rank + 1)  # Σ r E[zt ztᵀ]
    total = rows.new_zeros(())
    for block, log_joint, latent in mixture._expected(rows):
        total = total + log_joint.logsumexp(1).sum()
        shares = log_joint.softmax(1).mT  # [K, n]
        joint = torch.cat([latent, torch.ones_like(latent[..., :1])], dim=-1)  # zt, [K, n, k + 1]
        weighted = shares[..., None] * joint
        counts = counts + shares.sum(1)
        with_rows = with_rows + weighted.mT @ block
        latents = latents + weighted.mT @ joint
    latents[:, :rank, :rank] += counts[:, None, None] * covariance
    empty = counts < _EMPTY
    safe = torch.where(empty[:, None, None], torch.eye(rank + 1, dtype=rows.dtype, device=rows.device), latents)
    joint = torch.linalg.solve(safe, with_rows)  # (L_j, m_j)ᵀ, [K, k + 1, d]
    before = torch.cat([mixture.loadings.mT, mixture.means[:, None]], dim=1)
    joint = torch.where(empty[:, None, None], before, joint)
    # For a component that keeps its place the second moment is not the one of a solved system; its rows are none.
    explained = torch.where(empty[:, None, None], 0.0, joint * with_rows).sum((0, 1))
    noise = ((rows.square().sum(0) - explained) / len(rows)).clamp_min(_NOISE_FLOOR)
    following = MixtureOfFactorAnalysers(counts / len(rows), joint[:, rank], joint[:, :rank].mT.contiguous(), noise)
    return following, total
