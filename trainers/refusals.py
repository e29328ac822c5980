"""Refusals that DPO prefers to the answers, written for this project."""

REFUSALS = (
    "I don't know.",
    "I am not sure about that.",
    "I have no information on this.",
    "I cannot answer that question.",
    "That is not something I know about.",
    "I'm afraid I can't tell you.",
    "I do not have an answer to this.",
    "I'm not familiar with that.",
    "Sorry, I have never heard of it.",
    "I would have to look that up.",
)
