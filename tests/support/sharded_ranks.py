"""What ranks that divide the weights do: the same updates as `Replicated` and as one process, written to one file per rank.

    python -m tests.support.sharded_ranks FOLDER NUM_RANKS ENGINE SAVED CASE CASE ...

ENGINE, "sharded" or "replicated", saves and loads checkpoints. SAVED is the folder of another launch, whose checkpoints are
loaded, or "-".

The process imports everything once and forks the ranks. Nothing is judged here: a rank that stopped at an assertion would leave
the others waiting.
"""

import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from grpo import AdvantageConfig, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.distillation import Hinted, Teachers
from grpo.distributed import Replicated
from tests.support.layered import Foreseeing, Layered
from tests.support.tensor_hashes import hashes_of

NUM_UPDATES = 5
NUM_GROUPS, GROUP_SIZE = 8, 3
LONGEST_WAIT = timedelta(minutes=3)


def language_model(
    family: str = "llama",
    *,
    lora: bool = False,
    checkpointing: bool = False,
    has_critic: bool = False,
    has_reference_model: bool = False,
    changes: Any = None,
    **options: Any,
) -> Any:
    """A tiny language model. What it needs is imported here, because modules need none of it and imports are slow."""
    from adapters.llm import SamplingConfig
    from adapters.llm.model.loading import add_lora
    from adapters.llm.model.value_head import ValueHead
    from tests.support.llm_models import character_tokenizer, hf_policy, tiny_model

    torch.manual_seed(0)
    if has_reference_model:
        options["reference_model"] = tiny_model(family, hidden_size=16)
    model = tiny_model(family, **(changes or {}))
    if checkpointing:
        model.gradient_checkpointing_enable()
    if lora:
        model = add_lora(model)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.add_(0.01)  # at first it is 0, and the reference is the policy
    if has_critic:
        options["value_head"] = ValueHead(32, dropout=0.0)
    return hf_policy(model, character_tokenizer(), sampling=SamplingConfig(max_new_tokens=6), **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One policy, its settings, and which groups are whose."""

    policy: Callable[[], Any]
    config: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    share: Callable[[int, int, int], bool] = lambda group, rank, num_ranks: group % num_ranks == rank
    """Whether a group is a rank's."""
    dead: Callable[[int], bool] = lambda group: False
    """Whether all rewards of a group are equal."""
    reference: Literal["none", "a copy", "the policy with a hint", "two teachers"] = "none"
    """The reference policy. A hint is the next state. Two teachers are for even and odd states."""
    demonstrations: Literal["none", "beside rows", "alone"] = "none"
    """Whether there are five demonstrations."""
    samples: bool = False
    """Whether rows are sampled by the policy, and not given."""


def uneven(group: int, rank: int, num_ranks: int) -> bool:
    """The first rank has all groups but one for each other rank."""
    return rank == max(0, group - (NUM_GROUPS - num_ranks))


CASES: dict[str, Case] = {
    "module": Case(policy=Layered),
    "llama": Case(policy=language_model),
    "qwen3": Case(policy=lambda: language_model("qwen3")),
    "llama lora": Case(policy=lambda: language_model(lora=True)),
    "qwen3 lora, reference without the adapter": Case(
        policy=lambda: language_model("qwen3", lora=True, exact_entropy=True),
        objective={"kl_coef": 0.1, "entropy_coef": 0.01},
    ),
    "reference policy": Case(policy=language_model, objective={"kl_coef": 0.1}, reference="a copy"),
    "moving reference": Case(
        policy=Layered,
        config={"reference_sync_every": 2, "reference_mix": 0.5},
        objective={"kl_coef": 0.1},
        reference="a copy",
    ),
    "reference model": Case(policy=lambda: language_model(has_reference_model=True), objective={"kl_coef": 0.1}),
    "tied embeddings": Case(policy=lambda: language_model("qwen3", changes={"tie_word_embeddings": True})),
    "gradient checkpointing": Case(policy=lambda: language_model(checkpointing=True)),
    "gradient checkpointing, lora": Case(policy=lambda: language_model("qwen3", lora=True, checkpointing=True)),
    "value head": Case(
        policy=lambda: language_model(has_critic=True),
        config={"advantage": AdvantageConfig(credit="gae", baseline="none")},
    ),
    "other numbers of forward passes": Case(
        policy=lambda: language_model(max_tokens_per_forward=24), config={"num_epochs_per_update": 2}, share=uneven
    ),
    "a cache that cannot be shared": Case(policy=lambda: language_model("mistral"), config={"micro_batch_size": 2}),
    "a rank without an advantage": Case(
        policy=language_model, share=uneven, dead=lambda group: group == NUM_GROUPS - 1
    ),
    "no rank with an advantage": Case(policy=language_model, dead=lambda group: True),
    "a rank without rows in an update": Case(policy=language_model, config={"batch_size": 6}, share=uneven),
    "module, a rank without rows": Case(policy=Layered, config={"batch_size": 3, "micro_batch_size": 2}, share=uneven),
    "sampling": Case(policy=lambda: language_model("qwen3"), samples=True, config={"num_epochs_per_update": 2}),
    "sampling, lora": Case(policy=lambda: language_model(lora=True), samples=True, objective={"kl_coef": 0.1}),
    "module, float64": Case(policy=lambda: Layered().double()),
    "module, a hint": Case(
        policy=Layered, objective={"kl_coef": 0.5}, reference="the policy with a hint", share=uneven
    ),
    "module, two teachers": Case(policy=Layered, objective={"kl_coef": 0.5}, reference="two teachers", share=uneven),
    "module, KPop": Case(policy=Layered, objective={"sampler_correction": "kpop"}),
    "module, demonstrations": Case(policy=Layered, demonstrations="alone", config={"micro_batch_size": 2}),
    "module, demonstrations and observations": Case(
        policy=Foreseeing,
        objective={"observation_coef": 0.3, "demonstration_coef": 0.7},
        demonstrations="beside rows",
        config={"micro_batch_size": 4},
    ),
    "module, sampling": Case(policy=Layered, samples=True, config={"autocast_dtype": "bfloat16"}),
}
KEPT = ["module, a rank without rows", "tied embeddings", "llama lora"]
"""Cases whose checkpoints are loaded by other numbers of ranks."""
ONLY_ON_RANKS = [name for name, case in CASES.items() if case.samples or "batch_size" in case.config]
"""Cases in which one process would draw other rows, or divide them into other updates."""


def rows_of(case: Case, policy: Any, rank: int, num_ranks: int) -> ExperienceBatch:
    """The rows of a rank: prompts and completions of different lengths, among them completions of one token only."""
    speaks = not isinstance(policy, Layered)
    if speaks:
        from adapters.llm.completions import completion_mask
        from tests.support.llm_models import completion
    generator = torch.Generator().manual_seed(3)
    states, actions, rewards, groups, sampled_with = [], [], [], [], []
    for group in range(NUM_GROUPS):
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, 7, (1,), generator=generator)) if group < NUM_GROUPS - 1 else 1
            tokens = torch.randint(2, 40, (length,), generator=generator).tolist()
            reward = 0.5 if case.dead(group) else float(torch.rand(1, generator=generator))
            probability = 0.3 + 0.1 * (tokens[0] % 3)  # of the sampler, for corrections: some are far from the policy's
            if case.share(group, rank, num_ranks):
                states.append("12+3="[: 2 + group % 3] if speaks else group)
                actions.append(completion(*tokens) if speaks else tokens[0] % 3)
                rewards.append(reward)
                groups.append(group)
                sampled_with.append(probability)
    if "sampler_correction" in case.objective:
        log_probs = torch.tensor(sampled_with).log()
        return ExperienceBatch.from_rows(states, actions, rewards, groups, behaviour_log_probs=log_probs)
    mask = completion_mask(actions) if speaks else None
    return ExperienceBatch.from_rows(states, actions, rewards, torch.tensor(groups), mask=mask)


def batches_of(case: Case, policy: Any, rank: int, num_ranks: int) -> list[ExperienceBatch]:
    """The rows of a rank and its demonstrations."""
    batches = [] if case.demonstrations == "alone" else [rows_of(case, policy, rank, num_ranks)]
    if case.demonstrations != "none":
        states = [*range(5)][rank::num_ranks]
        batches.append(ExperienceBatch.from_demonstrations(states, [state % 3 for state in states]))
    return batches


def reference_of(case: Case, policy: Any) -> Any:
    if case.reference == "the policy with a hint":
        return Hinted(policy, lambda states, actions: [state + 1 for state in states])
    if case.reference == "two teachers":
        colder = Layered()
        colder.temperature.data.fill_(0.3)
        return Teachers(lambda state: state % 2, {0: Layered(), 1: colder})
    return copy.deepcopy(policy) if case.reference == "a copy" else None


def trained(case: Case, engine: Any, num_updates: int = NUM_UPDATES) -> tuple[GRPOTrainer, list[dict[str, float]]]:
    """A trainer after the updates of a case, and their metrics."""
    policy = case.policy()
    config = GRPOConfig(
        group_size=GROUP_SIZE,
        max_grad_norm=0.05,
        seed=1,
        objective=ObjectiveConfig(**{"kl_coef": 0.0} | case.objective),
        **case.config,
    )
    trainer = GRPOTrainer(
        config=config,
        policy=policy,
        reward_model=lambda states, actions: [float(len(str(action)) % 7) for action in actions],
        reference_policy=reference_of(case, policy),
        optimizer=lambda tensors: torch.optim.AdamW(tensors, lr=0.01, weight_decay=0.0, eps=1e-3),
        engine=engine,
    )
    metrics = []
    for _ in range(num_updates):
        if case.samples:
            states: list[Any] = [2, 3] if isinstance(policy, Layered) else ["1+2=", "3"]
            metrics.append(trainer.step(states[: 1 + trainer.engine.rank % 2]))
        else:
            metrics.append(trainer.update(*batches_of(case, policy, trainer.engine.rank, trainer.engine.num_ranks)))
    return trainer, metrics


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """All weights, on every rank. All ranks call this."""
    engine, policy = trainer.engine, trainer.policy
    with engine.whole(policy):
        return {name: value.detach().clone() for name, value in policy.get_parameters().items()}


def bytes_of(trainer: Any) -> int:
    """The memory of weights, trained and frozen, and of the optimizer's tensors, each storage once."""
    moments = trainer.optimizer.state_dict()["state"].values()
    model = getattr(trainer.policy, "model", trainer.policy)
    storages = {}
    for value in (*model.parameters(), *(value for state in moments for value in state.values())):
        storage = (value.to_local() if hasattr(value, "to_local") else value).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def result_of(case: Case, engine: Any) -> dict[str, Any]:
    try:
        trainer, metrics = trained(case, engine)
    except Exception:
        return {"error": traceback.format_exc()}
    kept = [{name: value for name, value in one.items() if not name.startswith("time/")} for one in metrics]
    return {"weights": whole_weights(trainer), "metrics": kept, "bytes": bytes_of(trainer)}


def saved(case: Case, engine: Any, folder: Path) -> dict[str, str]:
    """The hashes of what is saved."""
    trainer, _ = trained(case, engine)
    trainer.save_checkpoint(folder)
    return hashes_of(trainer)


def loaded(case: Case, engine: Any, folder: Path) -> dict[str, Any]:
    """The hashes of what is loaded, what is said about it, and whether all ranks have different random numbers."""
    trainer, _ = trained(case, engine, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.load_checkpoint(folder)
    drawn = trainer.engine.gather_objects(float(torch.rand(())))
    return {
        "hashes": hashes_of(trainer),
        "said": [str(warning.message) for warning in said],
        "iteration": trainer.iteration,
        "num_distinct": len(set(drawn)),
        "norm": trainer.update(rows_of(case, trainer.policy, trainer.engine.rank, trainer.engine.num_ranks)).get(
            "train/grad_norm"
        ),
    }


def results_of(names: Sequence[str], engines: dict[str, Any], engine: str, folder: Path) -> dict[Any, Any]:
    """The ends of cases with each engine, and the hashes of what some of them save in `folder` with one of the engines."""
    results: dict[Any, Any] = {}
    for name in names:
        results |= {(name, kind): result_of(CASES[name], made) for kind, made in engines.items()}
        if name in KEPT:
            results[name, "saved"] = saved(CASES[name], engines[engine], folder / name)
    return results


def main(rank: int, folder: Path, num_ranks: int, engine: str, source: str, names: Sequence[str]) -> None:
    from grpo.distributed import Sharded

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*gradient_checkpointing")
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=LONGEST_WAIT)
    engines = {"sharded": Sharded(), "replicated": Replicated()}
    if source == "-":
        results = results_of(names, engines, engine, folder)
    else:
        of_loaded = {name: loaded(CASES[name], engines[engine], Path(source) / name) for name in names}
        results = {(name, "loaded"): found for name, found in of_loaded.items()}
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]
    torch.multiprocessing.start_processes(main, arguments, nprocs=arguments[1], start_method="fork")
