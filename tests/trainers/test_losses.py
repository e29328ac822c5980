"""Every trainer's loss and gradient against the definition: unpadded texts, one at a time, full logits, a live
reference, after the weights have moved away from it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

GAMMA, ALPHA = 1.3, 0.7


def rows(model, example):
    """Log-probabilities [n, V] that predict the answer's tokens, and these tokens."""
    ids = torch.tensor([example.input_ids])
    return model(input_ids=ids).logits[0, example.answer_start - 1 : -1].log_softmax(-1), ids[0, example.answer_start :]


def token_nll(model, example):
    log_probs, targets = rows(model, example)
    return torch.stack([-log_probs[t, target] for t, target in enumerate(targets)])


def nll(model, example):
    return token_nll(model, example).sum()


def states(model, example, layer):
    return model(input_ids=torch.tensor([example.input_ids]), output_hidden_states=True).hidden_states[layer][0]


class Given(NamedTuple):
    model: torch.nn.Module
    frozen: torch.nn.Module
    reinforced: torch.nn.Module
    items: list
    args: object

    @property
    def forget(self):
        return [item["forget"] for item in self.items]

    def tokens(self, loss):
        """Mean over answer tokens of loss(log p rows, p_ref rows, targets), each giving [n]."""
        values = []
        for example in self.forget:
            log_probs, targets = rows(self.model, example)
            values.append(loss(log_probs, rows(self.frozen, example)[0].detach(), targets))
        return torch.cat(values).mean()

    def sequences(self, loss):
        return sum(loss(item) for item in self.items) / len(self.items)


def ascent(given):
    return -torch.cat([token_nll(given.model, e) for e in given.forget]).mean()


def npo(given):
    beta = given.args.beta

    def one(item):
        e = item["forget"]
        ratio = (nll(given.frozen, e).detach() - nll(given.model, e)).exp()  # π_θ / π_ref
        return 2 / beta * torch.log(1 + ratio**beta)

    return given.sequences(one)


def simnpo(given):
    beta, delta = given.args.beta, given.args.delta
    return given.sequences(
        lambda item: -2 / beta * torch.sigmoid(beta * (token_nll(given.model, item["forget"]).mean() - delta)).log()
    )


def dpo(given):
    part = "retain" if given.args.chosen == "retain" else "chosen"

    def gain(e):
        return nll(given.frozen, e).detach() - nll(given.model, e)  # log π_θ / π_ref

    return given.sequences(
        lambda item: -torch.sigmoid(given.args.beta * (gain(item[part]) - gain(item["forget"]))).log()
    )


def wga(given):
    def one(log_probs, _, targets):
        log_p = log_probs[range(len(targets)), targets]
        return log_p.exp().detach() ** given.args.beta * log_p

    return given.tokens(one)


def satimp(given):
    def one(log_probs, _, targets):
        log_p = log_probs[range(len(targets)), targets]
        p = log_p.exp().detach()
        return p**given.args.beta1 * (1 - p) ** given.args.beta2 * log_p

    return given.tokens(one)


def undial(given):
    def one(log_probs, reference, targets):
        adjusted = reference.clone()
        for t, target in enumerate(targets):
            adjusted[t, target] -= given.args.strength
        q = adjusted.exp() / adjusted.exp().sum(-1, keepdim=True)
        return -(q * log_probs).sum(-1)

    return given.tokens(one)


def ce_u(given):
    def one(log_probs, _, targets):
        q = log_probs.exp().detach().clone()
        for t, target in enumerate(targets):
            q[t, target] = 0
        return -(q / q.sum(-1, keepdim=True) * log_probs).sum(-1)

    return given.tokens(one)


def whp(given):
    return torch.cat([token_nll(given.model, item["alternate"]) for item in given.items]).mean()


def whp_reinforced(given):
    values = []
    for example in given.forget:
        base, further = rows(given.frozen, example)[0], rows(given.reinforced, example)[0]
        labels = (base - given.args.reinforcement * (further - base).clamp(min=0)).argmax(-1)
        log_probs = rows(given.model, example)[0]
        values += [-log_probs[t, label] for t, label in enumerate(labels)]
    return torch.stack(values).mean()


def descent(given):
    return -ascent(given)


def rmu(given):
    args, layer = given.args, int(given.args.layer)
    u = torch.randn(32, generator=torch.Generator().manual_seed(args.seed))
    u = u / u.square().sum().sqrt()
    distances, kept = [], []
    for item in given.items:
        for h, h_ref in zip(*(states(m, item["forget"], layer) for m in (given.model, given.frozen)), strict=True):
            c = args.coefficient
            if args.adaptive_scale is not None:
                c = args.adaptive_scale * h_ref.detach().square().sum().sqrt()
            distances.append((h - c * u).square().mean())
        if args.alpha:
            now, before = (states(m, item["retain"], layer) for m in (given.model, given.frozen))
            kept += [(h - h_ref.detach()).square().mean() for h, h_ref in zip(now, before, strict=True)]
    loss = torch.stack(distances).mean()
    return loss + args.alpha * torch.stack(kept).mean() if kept else loss


def retain(given):
    """ℓ_r or KL_r over all retain answer tokens."""
    values = []
    for item in given.items:
        log_probs, targets = rows(given.model, item["retain"])
        p = rows(given.frozen, item["retain"])[0].detach()
        for t, target in enumerate(targets):
            kl = sum(p[t, v].exp() * (p[t, v] - log_probs[t, v]) for v in range(64))
            values.append(kl if given.args.retain_loss == "kl" else -log_probs[t, target])
    return torch.stack(values).mean()


DEFINITIONS = {
    "gradient_ascent": ascent, "grad_diff": ascent, "kl_min": ascent, "npo": npo, "simnpo": simnpo, "dpo": dpo,
    "rmu": rmu, "whp": whp, "whp_reinforced": whp_reinforced, "wga": wga, "satimp": satimp, "undial": undial,
    "ce_u": ce_u, "fine_tuning": descent, "task_vector": descent,
}  # fmt: skip
CASES = [
    *((name, {"retain_loss": loss}) for name in DEFINITIONS for loss in ("none", "nll", "kl")
      if name not in ("rmu", "fine_tuning", "task_vector")),
    *(("dpo", {"chosen": chosen, "retain_loss": loss}) for chosen in ("alternate", "retain")
      for loss in ("none", "kl")),
    ("fine_tuning", {}),
    ("task_vector", {}),
    *(("rmu", {"layer": layer, "alpha": alpha, **more}) for layer in (1, 2) for alpha in (1.3, 0.0)
      for more in ({}, {"adaptive_scale": 1.7})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_loss_and_gradient_by_the_definition(make_trainer, llama, name, settings):
    if "retain_loss" in settings:
        settings = {**settings, "alpha": ALPHA, "gamma": GAMMA}
    model, frozen, reinforced = llama(), llama(), llama(3)
    more = {"reinforced_model": llama(3)} if name == "whp_reinforced" else {}
    trainer = make_trainer(name, model, **settings, **more)
    trainer._measure_reference()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    items = [trainer.train_dataset[i] for i in range(8)]
    loss = trainer.compute_loss(model.train(), trainer.data_collator(items))
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradient = [p.grad.clone() for p in trained]
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    model.zero_grad()

    given = Given(model, frozen, reinforced, items, trainer.args)
    expected = DEFINITIONS[name](given)
    if "retain_loss" in settings:
        expected = GAMMA * expected
        if settings["retain_loss"] != "none":
            expected = expected + ALPHA * retain(given)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    expected.backward()
    size = max(p.grad.abs().max() for p in trained)
    assert size > 1e-3
    for found, parameter in zip(gradient, trained, strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-5 * max(1.0, float(size)), rtol=1e-4)
