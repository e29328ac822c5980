"""What the unsteered model makes of responses: how likely they are, and what they make likely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import Answers, measure_activations
from monitor.generation import greedy_answers
from monitor.geometry.answers import answer_nll
from monitor.stimuli.encoding import asked_prompt

# Says nothing of what comes, but that it is English: without it a sentence of ours is 0.5 nats a token less likely to
# SmolLM2-135M, and its first words count for more.
_OPENING = "Here is a sentence:"


class Likelihood:
    """Reads responses with a model; one pass a call.

    Parameters
    ----------
    model : nn.Module
        A causal language model, unsteered. Left as it was found.
    tokenizer : PreTrainedTokenizerBase
    batch_tokens : int
        Padded tokens in a batch.
    progress : str, optional
        Title of a progress bar on standard error; none without it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 4096,
        progress: str | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_tokens, self.progress = batch_tokens, progress

    def read(
        self, texts: Sequence[str], instructions: Sequence[str], responses: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        """Likelihood of texts, and of instructions given responses.

        Parameters
        ----------
        texts : sequence of n str
        instructions, responses : sequence of m str

        Returns
        -------
        nll : Tensor [n], float64
            −(1/T) Σ log p(token), nats a token, after an opening that tells nothing but that a text follows.
        log_prob : Tensor [m], float64
            (1/T) Σ log p(token of the instruction | the response before it), nats a token.

        Notes
        -----
        Plain texts, without a chat template: its tokens, of every text anew, would be most of the work.
        """
        requests = []
        if texts:
            requests.append(Answers((_OPENING,) * len(texts), tuple(f" {text.strip()}" for text in texts)))
        if instructions:
            prompts = tuple(f"Answer: {response.strip()}\nQuestion:" for response in responses)
            requests.append(Answers(prompts, tuple(f" {instruction.strip()}" for instruction in instructions)))
        if not requests:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        read = measure_activations(
            self.model, self.tokenizer, requests, token_budget=self.batch_tokens, progress=self.progress
        )
        nll = answer_nll(read.answers(requests[0]).log_probs) if texts else torch.zeros(0, dtype=torch.float64)
        log_prob = -answer_nll(read.answers(requests[-1]).log_probs) if instructions else nll[:0]
        return nll, log_prob

    def answers(self, instructions: Sequence[str], max_new_tokens: int) -> list[str]:
        """What the model says to the instructions, in its chat template where it has one; greedy."""
        return greedy_answers(
            self.model,
            self.tokenizer,
            [asked_prompt(self.tokenizer, text) for text in instructions],
            max_new_tokens=max_new_tokens,
            one_line=False,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
