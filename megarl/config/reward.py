"""The section `reward`: reward terms, their weights, and the sandbox of those that run programs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator, model_validator

from megarl.config.section import FilePath, Section, discriminate_by_type
from megarl.config.trainer import ParallelConfig


class SandboxConfig(Section):
    """Where programs of the policy run, and what they may use; `megarl doctor` names the tiers of a machine."""

    tier: Literal["auto", "bubblewrap", "launcher", "runsc", "service"] = "auto"
    """`bubblewrap`: the program of that name. `launcher`: megarl's own, by namespaces, Landlock and seccomp.
    `runsc`: gVisor, whose kernel runs between programs and that of the machine; a program takes about 0.2 CPU seconds
    more. `service`: one that runs elsewhere. `auto`: the first of bubblewrap, launcher and runsc that works here."""

    url: str | None = None
    """Address of the service of the tier `service`."""

    allow_unsafe: bool = False
    """Where no tier works on a machine, run programs with the rights of the user who runs megarl, limited in memory and
    time only. Such programs can read and change everything that this user can."""

    wall_seconds: float = Field(default=10.0, gt=0)
    """Time limit of a program on one input, or of one cell of an interpreter."""

    cpu_seconds: int = Field(default=5, ge=1)
    """CPU seconds of each process of a program."""

    memory_mib: int = Field(default=512, ge=16)
    """MiB of memory of a program and its children together."""

    disk_mib: int = Field(default=64, ge=1)
    """MiB of files that a program may write; they are kept in memory and deleted with the sandbox."""

    max_processes: int = Field(default=16, ge=2)
    """Largest number of processes and threads of a program."""

    output_kib: int = Field(default=64, ge=1)
    """KiB of a program's stdout, stderr and of the value of a call. A program that writes more is ended, unless a right
    output needs more; a cell's further output is left out."""

    @model_validator(mode="after")
    def _check_url(self) -> SandboxConfig:
        if self.tier == "service" and (self.url is None or not self.url.startswith(("http://", "https://"))):
            raise ValueError(f"tier: service needs a url that begins with http:// or https://, got {self.url!r}")
        if self.tier != "service" and self.url is not None:
            raise ValueError(f"url needs tier: service, got tier: {self.tier}")
        return self


class RewardTerm(Section):
    """Fields of every reward term."""

    weight: float = 1.0
    """Factor of the term in the sum. 0: the term is only logged."""


class RuleConfig(RewardTerm):
    """Fields of a rule: a reward that rollout workers compute, without a reward model."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout in seconds for one completion, or for one group with `per: group`."""

    on_error: Literal["drop", "raise"] = "drop"
    """What to do with a completion on which the term fails twice: it raises an exception, takes longer than
    `timeout_seconds` or returns no finite number, and fails again when it is called once more. `drop`: leave the
    completion out of the step, so that it counts neither for baselines and metrics nor for the loss. `raise`: end the
    run. Default: `drop`, because a failure is no judgement of the completion, and one among thousands should not end a
    run; a term with a defect fails on many, and then `reward.max_failed_share` ends the run."""


SERVICE_SETTINGS = frozenset(
    {
        "url",
        "api_key_env",
        "timeout_seconds",
        "max_retries",
        "max_concurrent_requests",
        "max_batch_size",
    }
)
"""Fields that say where and how a service is called, and not what it returns: they may change on resume."""


class ServiceRewardConfig(RuleConfig):
    """Fields of a reward term that calls a service. Limits and counts are those of one rollout worker."""

    url: str
    """Address of the service, beginning with http:// or https://."""

    api_key_env: str | None = None
    """Name of an environment variable of the rollout workers, whose value is sent as `Authorization: Bearer VALUE`.
    Default: no such header."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout in seconds of one request."""

    max_retries: int = Field(default=4, ge=0)
    """Number of times that a request is sent again after a timeout, a lost connection, or a status 408, 429 or 5xx.
    Then the term has failed on the completion. The time before a retry is random, so that workers do not retry all at
    once: half a second in the mean before the first, doubled with each retry, up to 30 seconds. A longer `Retry-After`
    of the service is obeyed."""

    max_concurrent_requests: int = Field(default=16, ge=1)
    """Number of requests that are in flight at once."""

    @model_validator(mode="after")
    def _check_url(self) -> ServiceRewardConfig:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url needs to begin with http:// or https://, got {self.url!r}")
        return self


class HttpRewardConfig(ServiceRewardConfig):
    """Reward from a service of one's own, which scores batches of completions of all groups.

    A request is a POST of `{"completions": [{"prompt_id", "prompt", "completion", "finish_reason", "row", "answer"},
    ...]}`; the answer is a list with one number per completion, or a mapping `{"reward": NUMBER, ...}` whose other
    entries are logged as `reward/<term>/<key>`.
    """

    type: Literal["http"]

    max_batch_size: int = Field(default=64, ge=1)
    """Largest number of completions in one request."""


class JudgeRewardConfig(ServiceRewardConfig):
    """Score that a language model gives a completion, asked through an OpenAI-compatible chat endpoint.

    `url` is the address before `/chat/completions`, such as `http://judge:8000/v1`.
    """

    type: Literal["judge"]

    model: str
    """Name of the model, as the endpoint knows it."""

    rubric: str
    """The message to the judge, with `{prompt}`, `{completion}` and, if rows have one, the reference `{answer}`."""

    system: str | None = None
    """System message before the rubric. Default: none."""

    pattern: str = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in the judge's reply. Its first group is the number; the last match
    counts. Default: the number after the last word "score"."""

    min_score: float = 0.0
    """Score that gives reward 0. A reply with a score below it is a failure."""

    max_score: float = 10.0
    """Score that gives reward 1. A reply with a score above it is a failure."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""

    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens of the judge's reply."""

    extra_body: dict[str, Any] = Field(default={})
    """Further fields of the request, such as `seed` or `response_format`."""

    @model_validator(mode="after")
    def _check_scores(self) -> JudgeRewardConfig:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score needs to be below max_score, got {self.min_score:g} >= {self.max_score:g}")
        if "{completion}" not in self.rubric:
            raise ValueError("rubric needs to contain {completion}, which the text of the completion replaces")
        return self


AUTO = "auto"
"""Name of no field: the fields of the layout in which the row is published."""


class CodeRewardConfig(RuleConfig):
    """Share of a row's test cases that the completion's program passes, in a sandbox that gets inputs only.

    The program is the last block of the completion that is labelled as Python, or else the last one without a label, or
    else all of the completion. Test cases are those of MBPP,
    HumanEval, APPS, LiveCodeBench and other data sets as they are published; or lists of
    `{"call": "f(1)", "expected": 2}` and, for programs that read stdin and print, of `{"input": TEXT, "output": TEXT}`,
    where `accepted`, in place of `expected` or `output`, has a list of all outputs that are right.
    """

    type: Literal["code"]

    tests_field: str = AUTO
    """Field of a row with its test cases. `auto`: the first of `test_list` (MBPP), `test` with `entry_point` (HumanEval
    and HumanEval+), `input_output` (APPS, TACO), `public_test_cases` and `private_test_cases` (LiveCodeBench),
    `public_tests`, `private_tests` and `generated_tests` (CodeContests), `tests`, `test_cases`, `official_tests`,
    `verification_info` and `reward_model`."""

    setup_field: str | None = AUTO
    """Field of a row with source, or a list of its lines, that is executed after the program and before calls. `auto`:
    `test_imports` and `test_setup_code`; rows without them have none."""

    solution_field: str | None = AUTO
    """Field of a row with a program that passes its test cases, for `megarl check`, which runs some of them, and for
    expected values that are no literals. `auto`: `code`, `canonical_solution` or the first of `solutions`."""

    ungradable_rows: Literal["error", "drop"] = "error"
    """What to do with rows whose test cases cannot be used: end with an error before the run, or drop them."""

    score: Literal["all", "share"] = "all"
    """`all`: 1.0 if all test cases pass, else 0.0; those after the first failure are not run. `share`: the share that
    passes."""

    require_block: bool = False
    """Give a completion without a block in backticks 0.0 instead of running all of it."""

    max_concurrent: int = Field(default=4, ge=1)
    """Number of sandboxes of a rollout worker that run at once."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Seconds for all test cases of a completion, from the start of its sandbox; each has at most
    `sandbox.wall_seconds`. Cases that are not done by then count as failed, since the program has used up the time."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where programs run."""


RESERVED_NAMES = frozenset({"mean", "informative_groups", "sampled_mean", "dropped"})
"""Metrics `reward/<name>` that are not the mean of a term."""

TERM_METRICS = ("failed", "retried", "share", "weight", "seconds_mean", "seconds_max", "length_correlation")
"""Metrics `reward/<term>/<key>` of every term; no further value of a reward can have their keys."""


class NumericRewardConfig(RewardTerm):
    r"""1.0 if the completion's final number equals the reference (`#### N` or `\boxed{N}`), else 0.0.

    Each reference needs to be a number; `math` has other answers, too.
    """

    type: Literal["numeric"] = "numeric"

    strict: bool = False
    """Accept only completions that end with a stop token and whose text ends in exactly `#### <answer>`."""


class MathRewardConfig(RuleConfig):
    r"""1.0 if the completion's final answer (`#### N` or `\boxed{N}`) equals the reference, else 0.0.

    Answers are numbers, expressions, sets, intervals, tuples, matrices, equations, inequalities, words or letters of a
    multiple choice. The share of answers whose comparison took too much time or memory, which score 0, is logged as
    `reward/<term>/undecided`.
    """

    type: Literal["math"]

    cpu_seconds: float = Field(default=1.0, gt=0)
    """CPU time in seconds for the comparison of two expressions. One that needs more scores 0."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    """Wall time in seconds after which the process that compares is taken for hung and restarted."""


class FormatRewardConfig(RuleConfig):
    """1.0 if the completion matches a regular expression, else 0.0."""

    type: Literal["format"]

    pattern: str = r"####\s*\S+\s*$"
    """Regular expression in the syntax of the package `regex` (that of `re`, and more), searched for anywhere in the
    text. Default: the text ends in `#### <answer>`."""


class PythonRewardConfig(RuleConfig):
    """A function of the user `(trajectory, text, row, **kwargs) -> float`, or a class with such a method `score`.

    Both may be async. Instead of a float, they may return a mapping with the key `reward`; its other entries are logged
    as `reward/<term>/<key>`.
    """

    type: Literal["python"]

    path: str
    """Import path of the function or class: `package.module:name`. A class is created once in each rollout worker; its
    method `close()`, if it has one, is called when the worker ends."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, or of the constructor of the class."""

    per: Literal["sample", "group"] = "sample"
    """`group`: called once for all completions of a prompt, as `(trajectories, texts, row) -> sequence` with one result
    per completion. In evaluation a group has one completion."""


class EnvironmentRewardConfig(RewardTerm):
    """Sum of the rewards that the environment (`rollout.env`) has given in the episode's steps."""

    type: Literal["environment"]


class ModelRewardConfig(RewardTerm):
    """Score of a reward model. The model is loaded for training only: the term takes no part in evaluation."""

    type: Literal["model"]

    path: FilePath
    """Folder in Hugging Face format of a sequence classification model with one label, or a hub id as in
    `model.path`."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


AnyRuleConfig = (
    NumericRewardConfig
    | MathRewardConfig
    | FormatRewardConfig
    | PythonRewardConfig
    | EnvironmentRewardConfig
    | CodeRewardConfig
    | HttpRewardConfig
    | JudgeRewardConfig
)

RewardConfig = Annotated[
    Annotated[NumericRewardConfig, Tag("numeric")]
    | Annotated[MathRewardConfig, Tag("math")]
    | Annotated[FormatRewardConfig, Tag("format")]
    | Annotated[PythonRewardConfig, Tag("python")]
    | Annotated[EnvironmentRewardConfig, Tag("environment")]
    | Annotated[CodeRewardConfig, Tag("code")]
    | Annotated[HttpRewardConfig, Tag("http")]
    | Annotated[JudgeRewardConfig, Tag("judge")]
    | Annotated[ModelRewardConfig, Tag("model")],
    discriminate_by_type("numeric"),
]


class RewardsConfig(Section):
    """The reward of a completion: the weighted sum of its terms."""

    terms: dict[str, RewardConfig] = Field(default={"accuracy": NumericRewardConfig()}, min_length=1)
    """Name -> reward term. Each is logged as `reward/<name>`. Default: `accuracy`, of type `numeric`."""

    @field_validator("terms")
    @classmethod
    def _check_names(cls, terms: dict[str, RewardConfig]) -> dict[str, RewardConfig]:
        for name in terms:
            if name in RESERVED_NAMES or "/" in name:
                raise ValueError(
                    f"a term needs a name without / that is none of {', '.join(sorted(RESERVED_NAMES))}, which are "
                    f"metrics of all terms, got {name!r}"
                )
        return terms

    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of a step's completions that one term, or the environment, may fail on (`on_error: drop`). A step
    with more failures ends the run with the name of the term and its first error. 1: no limit."""

    eval_term: str | None = None
    """Name of the term that evaluation reports. It needs to be a rule, not a model. Default: the first rule."""

    @model_validator(mode="after")
    def _check_eval_term(self) -> RewardsConfig:
        if self.eval_term is None:
            return self
        if self.eval_term not in self.terms:
            raise ValueError(f"eval_term needs to be one of {sorted(self.terms)}, got {self.eval_term!r}")
        if self.eval_term not in self.rules:
            raise ValueError(
                f"eval_term needs to be a rule, got {self.eval_term!r}, which is a model: evaluation does not load "
                "reward models"
            )
        return self

    @property
    def rules(self) -> list[str]:
        """Names of the terms that are rules, which rollout workers compute."""
        return [name for name, term in self.terms.items() if not isinstance(term, ModelRewardConfig)]

    @property
    def environments(self) -> list[str]:
        """Names of the terms that are rewards of an environment's steps."""
        return [name for name, term in self.terms.items() if isinstance(term, EnvironmentRewardConfig)]

    @property
    def models(self) -> dict[str, ModelRewardConfig]:
        """Name -> term, of the terms that are reward models."""
        return {name: term for name, term in self.terms.items() if isinstance(term, ModelRewardConfig)}

    @property
    def eval_name(self) -> str:
        """Name of the term that evaluation reports. Only valid if `data.eval_path` is set: then there is a rule."""
        return self.eval_term or self.rules[0]
