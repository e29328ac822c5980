"""The paper's numbers of six models by dimension (arXiv 2609.22337, tables III and V), beside which ours are set."""

from __future__ import annotations

from statistics import median

# GPT-2 Small, Medium, Large, XL, BERT-base, Qwen2.5-7B-Instruct
AUC_MIXED = {
    "gender": (0.699, 0.702, 0.691, 0.715, 0.671, 0.686),
    "race": (0.708, 0.728, 0.715, 0.729, 0.698, 0.722),
    "religion": (0.713, 0.722, 0.716, 0.728, 0.720, 0.718),
    "age": (0.711, 0.726, 0.708, 0.728, 0.706, 0.721),
}
AUC_MIXED_SD = {
    "gender": (0.014, 0.009, 0.013, 0.012, 0.014, 0.004),
    "race": (0.007, 0.007, 0.015, 0.013, 0.012, 0.005),
    "religion": (0.006, 0.006, 0.014, 0.013, 0.011, 0.005),
    "age": (0.009, 0.005, 0.015, 0.014, 0.013, 0.005),
}
SEPARATION = {
    "gender": (10.39, 14.15, 16.43, 18.68, 13.27, 8.27),
    "race": (15.42, 21.28, 24.28, 29.21, 17.47, 16.88),
    "religion": (16.90, 23.73, 30.21, 33.88, 23.50, 15.01),
    "age": (18.81, 27.84, 33.32, 39.77, 25.08, 18.50),
}
INTRINSIC_DIMENSION = {
    "gender": (6.2, 6.1, 6.1, 6.0, 6.6, 4.3),
    "race": (6.3, 5.8, 6.1, 6.1, 5.6, 5.5),
    "religion": (6.2, 5.8, 6.0, 5.7, 6.6, 5.3),
    "age": (6.9, 6.6, 6.7, 6.7, 6.8, 5.4),
}
OFFSET = {
    "gender": (0.84, 0.12, 2.70, 2.09, 0.26, 1.24),
    "race": (4.45, 6.02, 9.29, 2.03, 2.38, 1.97),
    "religion": (0.31, 12.78, 16.86, 10.53, 3.74, 1.89),
    "age": (0.26, 3.09, 6.26, 11.94, 1.28, 1.53),
}
MAE = {
    "gender": (0.018, 0.025, 0.021, 0.019, 0.048, 0.028),
    "race": (0.013, 0.016, 0.014, 0.013, 0.038, 0.011),
    "religion": (0.014, 0.016, 0.013, 0.011, 0.036, 0.012),
    "age": (0.012, 0.022, 0.011, 0.009, 0.025, 0.011),
}
S_FIT = {
    "gender": (4.41, 4.09, 4.02, 4.06, 2.96, 3.56),
    "race": (8.34, 20.00, 4.68, 4.61, 3.33, 5.00),
    "religion": (5.48, 8.21, 4.82, 4.99, 3.50, 4.76),
    "age": (6.29, 20.00, 5.39, 5.93, 4.02, 4.94),
}
MAE_FIT = {
    "gender": (0.010, 0.014, 0.008, 0.008, 0.018, 0.009),
    "race": (0.013, 0.016, 0.007, 0.006, 0.018, 0.005),
    "religion": (0.011, 0.016, 0.007, 0.005, 0.018, 0.006),
    "age": (0.011, 0.022, 0.009, 0.006, 0.014, 0.007),
}


def typical(table: dict[str, tuple[float, ...]], dimension: str) -> float:
    """Median of the paper's six models."""
    return float(median(table[dimension]))


def span(table: dict[str, tuple[float, ...]]) -> str:
    """Smallest and largest of the paper's 24 values, in words."""
    values = [value for row in table.values() for value in row]
    return f"{min(values):g} to {max(values):g}"
