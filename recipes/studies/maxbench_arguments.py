"""Arguments of the MAxBench study."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from monitor.geometry.concept_scores import SCORES
from monitor.stimuli.concepts import CONCEPTS, CONTROL
from monitor.stimuli.instructions import Instructions, load_instructions
from recipes.studies.maxbench_geometries import KINDS, METHODS

FORMS = ("linear", "affine")
_DEFAULT_METHODS = tuple(name for name in METHODS if name != "sae")


@dataclass
class MaxBenchArguments:
    """What is recovered, how it is steered with, and how it is judged; the defaults are the paper's setting.

    Parameters
    ----------
    model : str
        A folder, a Hub id or an embedded name; a causal language model.
    dtype : str
        Of the model's weights, and of the judge's.
    output_dir : str
        Where every answer and judgement goes; a study that was stopped goes on there.
    concepts : list of str
        Bundled concepts, or files of concept sets (`monitor.stimuli.concept_file`).
    control : str
        Whose contexts are the negatives of methods that need some.
    methods : list of str
        Of `recipes.studies.maxbench_geometries.METHODS`. "sae" needs `sae`.
    forms : list of str
        "linear", "affine" or both, for the methods that have both.
    ranks : list of int
        Dimensions; one that is more than a method can have on a concept is lowered to the most it can.
    splits : int
        Of each kind; a concept that has no more is held to those (the seven days have seven).
    split_kinds : list of str
        "category" (a whole one held out), "entity" (some of every category), or both. A concept without categories has
        as many splits, with values held out.
    layer : str
        Hidden state to read and to steer: an index, or a fraction of the depth.
    sae : str, optional
        A sparse autoencoder of this layer, safetensors.
    components : int
        Of the mixture of factor analysers.
    lowest_sigma : float
        Smallest candidate of the sampling scale, as a share of the smallest norm of states; 1 as published.
    n_sigmas : int
        Candidates; 10 as published.
    strengths : list of float
        Grid, in typical state norms; see `recipes.studies.maxbench_steering`.
    decay : float
        What a decoding step leaves of the strength.
    select_by : str
        Score that the strength is chosen by.
    validation_prompts, validation_points : int
        Instructions, and points for each, that the strength is chosen on.
    test_prompts, points : int
        Instructions, and points for each, that are reported.
    max_new_tokens : int
        Of an answer.
    judge : str, optional
        A model that judges the test answers as well, beside the offline judge.
    task : bool
        Whether to ask first if the model can name the entities.
    n_bootstrap : int
        Resamples of intervals.
    seed : int
        Of splits, points and resamples.
    batch_tokens : int
        Tokens in a batch.
    quick : bool
        At most two concepts, 6 points x 2 prompts, two ranks and strengths, four methods: see that all works. In
        ``<output_dir>-quick``.
    only_tables : bool
        Tables of the cells that are there; no model is loaded.
    json : str, optional
        Also write the records to this file; "-" is standard output.
    """

    model: str = field(default="smollm2-135m", metadata={"help": "A folder, a Hub id or an embedded name."})
    dtype: str = field(default="float32", metadata={"help": "Of the weights: float32, bfloat16, ..."})
    output_dir: str = field(default="runs/maxbench", metadata={"help": "Where answers and judgements go."})
    concepts: list[str] = field(default_factory=lambda: list(CONCEPTS), metadata={"help": "Names, or JSONL files."})
    control: str = field(default=CONTROL, metadata={"help": "Concept whose contexts are the negatives."})
    methods: list[str] = field(
        default_factory=lambda: list(_DEFAULT_METHODS),
        metadata={"help": "Geometries, and baselines.", "choices": list(METHODS)},
    )
    forms: list[str] = field(
        default_factory=lambda: list(FORMS), metadata={"help": "With offset 0, or with it.", "choices": list(FORMS)}
    )
    ranks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "Dimensions."})
    splits: int = field(default=5, metadata={"help": "Of each kind; fewer where a concept has no more."})
    split_kinds: list[str] = field(
        default_factory=lambda: list(KINDS), metadata={"help": "What is held out.", "choices": list(KINDS)}
    )
    layer: str = field(default="0.8", metadata={"help": "Hidden-state index or fraction of the depth."})
    sae: str | None = field(
        default=None,
        metadata={"help": "A sparse autoencoder of this layer: safetensors with W_enc, b_enc, W_dec, b_dec."},
    )
    components: int = field(default=16, metadata={"help": "Of the mixture of factor analysers."})
    lowest_sigma: float = field(default=1.0, metadata={"help": "Smallest sigma, against the smallest state norm."})
    n_sigmas: int = field(default=10, metadata={"help": "Candidates of sigma."})
    strengths: list[float] = field(
        default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0],
        metadata={"help": "Grid of strengths, in typical state norms."},
    )
    decay: float = field(default=0.9, metadata={"help": "What a decoding step leaves of the strength."})
    select_by: str = field(
        default="maxbench", metadata={"help": "Score that the strength is chosen by.", "choices": list(SCORES)}
    )
    validation_prompts: int = field(default=5, metadata={"help": "Instructions that the strength is chosen on."})
    validation_points: int = field(default=30, metadata={"help": "Points for each of them."})
    test_prompts: int = field(default=5, metadata={"help": "Instructions that are reported."})
    points: int = field(default=30, metadata={"help": "Points for each of them."})
    max_new_tokens: int = field(default=20, metadata={"help": "Tokens of an answer."})
    judge: str | None = field(default=None, metadata={"help": "A model that judges the test answers as well."})
    task: bool = field(default=True, metadata={"help": "Ask first whether the model can name the entities."})
    n_bootstrap: int = field(default=1000, metadata={"help": "Resamples of intervals."})
    seed: int = field(default=0, metadata={"help": "Of splits, points and resamples."})
    batch_tokens: int = field(default=16384, metadata={"help": "Tokens in a batch."})
    quick: bool = field(default=False, metadata={"help": "See that all works, in OUTPUT_DIR-quick."})
    only_tables: bool = field(default=False, metadata={"help": "Tables of the cells that are there."})
    json: str | None = field(default=None, metadata={"help": "Also write the records to this file; '-' for stdout."})

    @property
    def instructions(self) -> Instructions:
        """The instructions in use."""
        found = load_instructions()
        return Instructions(found.validation[: self.validation_prompts], found.test[: self.test_prompts], found.norms)


def quick(arguments: MaxBenchArguments) -> MaxBenchArguments:
    """The first two concepts, with less of all, or no more than was asked for; in a folder of its own."""
    wanted = ("pca", "diff_mean", "isotropic", "unsteered")
    methods = [name for name in arguments.methods if name in wanted] or arguments.methods[:2]
    most = {"splits": 1, "validation_prompts": 1, "validation_points": 4, "test_prompts": 2, "points": 6,
            "max_new_tokens": 10}  # fmt: skip
    return replace(
        arguments, concepts=arguments.concepts[:2], methods=methods, task=False, quick=False,
        ranks=arguments.ranks if len(arguments.ranks) <= 2 else [1, 4],
        strengths=arguments.strengths if len(arguments.strengths) <= 2 else [0.3, 0.6],
        output_dir=f"{arguments.output_dir.rstrip('/')}-quick",
        **{name: min(number, getattr(arguments, name)) for name, number in most.items()},
    )  # fmt: skip


def layer_of(arguments: MaxBenchArguments) -> int | float:
    """The layer as a number: a hidden-state index, or a fraction of the depth."""
    try:
        return float(arguments.layer) if "." in arguments.layer else int(arguments.layer)
    except ValueError:
        raise ValueError(
            f"`layer` must be a hidden-state index or a fraction of the depth, got {arguments.layer!r}"
        ) from None


def check(arguments: MaxBenchArguments) -> None:
    """Refuse what cannot run, before a model is loaded."""
    layer_of(arguments)
    for name, known in (("methods", METHODS), ("forms", FORMS), ("split_kinds", KINDS)):
        values = getattr(arguments, name)
        unknown = [value for value in values if value not in known]
        if unknown or not values or len(set(values)) < len(values):
            raise ValueError(f"`{name}` must be some of {', '.join(known)}, each once, got {values}")
    if not arguments.concepts or len(set(arguments.concepts)) < len(arguments.concepts):
        raise ValueError(f"`concepts` must be one or more, each once, got {arguments.concepts}")
    if not arguments.ranks or min(arguments.ranks) < 1:
        raise ValueError(f"`ranks` must be one or more numbers from 1 up, got {arguments.ranks}")
    if not arguments.strengths or not all(0 < strength < float("inf") for strength in arguments.strengths):
        raise ValueError(f"`strengths` must be one or more positive numbers, got {arguments.strengths}")
    counts = ("splits", "components", "validation_prompts", "validation_points", "test_prompts", "points")
    for name in (*counts, "max_new_tokens", "n_bootstrap", "batch_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(arguments, name)}")
    if not 0 <= arguments.seed < 2**32:
        raise ValueError(f"`seed` must lie in 0 to 2**32 - 1, got {arguments.seed}")
    if arguments.n_sigmas < 2:
        raise ValueError(f"`n_sigmas` must be at least 2 candidates, got {arguments.n_sigmas}")
    if not 0 < arguments.lowest_sigma <= 1:
        raise ValueError(f"`lowest_sigma` must lie in (0, 1], got {arguments.lowest_sigma}")
    if not 0 <= arguments.decay <= 1:
        raise ValueError(f"`decay` must lie in [0, 1], got {arguments.decay}")
    available = load_instructions()
    for name, texts in (("validation_prompts", available.validation), ("test_prompts", available.test)):
        if getattr(arguments, name) > len(texts):
            raise ValueError(f"`{name}` must be at most {len(texts)}, got {getattr(arguments, name)}")
    if "sae" in arguments.methods and arguments.sae is None:
        raise ValueError("`methods` has sae and there is no `sae`: give a safetensors file, or leave the method out")
