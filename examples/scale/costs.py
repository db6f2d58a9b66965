"""What one iteration costs a rank: memory, bytes sent, and time. Estimates for choosing an engine, before anything is started.

    python -m examples.scale.costs --billions 0.6 --ranks 8
    python -m examples.scale.costs --billions 7 --hidden-size 4096 --layers 32 --ranks 8 --lora 0.005

`docs/scaling.md` compares the estimates with measurements.
"""

import argparse
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["replicated", "sharded"]
ENGINES: tuple[EngineName, ...] = ("replicated", "sharded")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder-only language model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    trained_fraction: float = 1.0
    """The part of the parameters that is trained. LoRA trains less than 0.01."""
    bytes_per_weight: int = 4
    """4 for float32, 2 for bfloat16."""
    key_value_fraction: float = 0.5
    """Size of a token's keys, as a fraction of the hidden size. Smaller with fewer key/value heads."""
    mlp_fraction: float = 3.0
    """Size of the MLP's hidden layer, as a multiple of the hidden size."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_parameters * self.bytes_per_weight

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained weights."""
        return round(self.trained_fraction * self.weight_bytes)

    @property
    def activation_bytes(self) -> int:
        """Bytes that one position of a forward pass keeps for the backward pass, without gradient checkpointing.

        A layer keeps about eleven vectors of the hidden size (the inputs and outputs of both norms, of attention and of the
        residual sums) and four of the MLP's size. Korthikanti et al. 2022, arXiv:2205.05198, count in the same way.
        """
        return round(self.num_layers * self.hidden_size * (11 + 4 * self.mlp_fraction) * self.bytes_per_weight)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one position while sampling."""
        return round(2 * self.num_layers * self.hidden_size * self.key_value_fraction * self.bytes_per_weight)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank does in an iteration. All numbers are of one rank."""

    num_ranks: int
    num_prompts: int
    group_size: int
    prompt_length: int
    new_tokens: int
    num_updates: int = 1
    forwards_per_update: int = 1
    """Forward passes of an update: its rows divided by `micro_batch_size`."""
    passes: int = 2
    """How often a forward pass runs each layer. `HFPolicy` runs it for the prompts, and then for the completions."""

    @property
    def num_rows(self) -> int:
        """Completions per iteration."""
        return self.num_prompts * self.group_size

    @property
    def num_positions(self) -> int:
        """Positions of an iteration's forward passes. A prompt is computed once for its group."""
        return self.num_prompts * (self.prompt_length + self.group_size * self.new_tokens)

    @property
    def positions_per_forward(self) -> float:
        """Positions of one forward pass."""
        return self.num_positions / (self.num_updates * self.forwards_per_update)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of one rank while the other ranks work, too."""

    flops: float
    """Multiplications and additions per second that the model reaches in a forward pass of many positions."""
    latency: float
    """Seconds of a forward pass of one token: what a step of sampling takes at least."""
    link: float
    """Bytes per second that a rank sends in a sum over all ranks."""


def memory(model: Model, run: Run, engine: EngineName) -> dict[str, float]:
    """Bytes of one rank, by what they are for.

    `update` and `sampling` are the two peaks. Moments are those of AdamW. While sampling, there are no gradients, and an engine
    that shards holds all weights beside its part of them.
    """
    share = 1 if engine == "replicated" else 1 / run.num_ranks
    weights, gradients = model.weight_bytes * share, model.gradient_bytes * share
    moments = 2 * gradients
    activations = run.positions_per_forward * model.activation_bytes
    gathered = 0.0  # weights and gradients of one layer, which are whole while it is computed
    exchanged = 0.0  # the gradients in one tensor, and the sum over all ranks
    if run.num_ranks > 1:
        if engine == "sharded":
            gathered = 2 * model.weight_bytes / model.num_layers
        else:
            exchanged = 2 * gradients
    # the first backward pass of an update frees activations while it makes gradients; later ones have both
    backward = max(activations, gradients) if run.forwards_per_update == 1 else activations + gradients
    whole = model.weight_bytes if engine == "sharded" else 0
    cache = run.num_prompts * run.group_size * (run.prompt_length + run.new_tokens) * model.cache_bytes
    return {
        "weights": weights,
        "gradients": gradients,
        "moments": moments,
        "activations": activations,
        "update": weights + moments + max(backward + gathered, gradients + exchanged),
        "sampling": weights + whole + moments + cache,
    }


def bytes_sent(model: Model, run: Run, engine: EngineName) -> float:
    """Bytes that one rank sends per iteration.

    A ring sums or gathers S bytes in N - 1 steps of S / N bytes: gathering sends (N - 1) / N S, summing to parts the same, and
    summing to every rank both, one after the other (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    once = (run.num_ranks - 1) / run.num_ranks
    if engine == "replicated":
        return 2 * once * model.gradient_bytes * run.num_updates
    passes = run.num_updates * run.forwards_per_update * run.passes
    in_updates = passes * (2 * model.weight_bytes + model.gradient_bytes)  # gathered for forward and for backward
    return once * (model.weight_bytes + in_updates)  # gathered once for sampling


def seconds(model: Model, run: Run, machine: Machine, engine: EngineName) -> dict[str, float]:
    """Seconds of one iteration on one rank: sampling, forward and backward passes, and the exchange with other ranks.

    A token costs 2 P operations in a forward pass of P parameters, and 4 P more in a backward pass (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). With LoRA the gradients of the frozen weights, 2 P, are not computed.
    """
    forward = 2 * model.num_parameters / machine.flops
    prompts = run.num_prompts * run.prompt_length * forward
    steps = run.new_tokens * (machine.latency + run.num_rows * forward)
    operations = 3 if model.trained_fraction == 1 else 2 + model.trained_fraction  # times those of a forward pass
    num_passes = run.num_updates * run.forwards_per_update * run.passes
    return {
        "sampling": prompts + steps,
        "update": num_passes * 3 * machine.latency + run.num_positions * operations * forward,
        "exchange": bytes_sent(model, run, engine) / machine.link,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=0.6, help="parameters in billions (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=28, help="default: %(default)s")
    parser.add_argument("--lora", type=float, default=1.0, help="trained part of the parameters (default: all)")
    parser.add_argument("--bytes-per-weight", type=int, choices=(2, 4), default=4)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=4, help="of one rank in an iteration (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--prompt-length", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--forwards", type=int, default=8, help="forward passes of an update (default: %(default)s)")
    args = parser.parse_args()
    model = Model(
        num_parameters=round(args.billions * 1e9),
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        trained_fraction=args.lora,
        bytes_per_weight=args.bytes_per_weight,
    )
    run = Run(
        num_ranks=args.ranks,
        num_prompts=args.prompts,
        group_size=args.group_size,
        prompt_length=args.prompt_length,
        new_tokens=args.new_tokens,
        forwards_per_update=args.forwards,
    )
    print(f"GiB of one rank of {args.ranks}    {'   '.join(ENGINES)}")
    parts = {engine: memory(model, run, engine) for engine in ENGINES}
    for name in parts["replicated"]:
        print(f"{name:22}" + "".join(f"{parts[engine][name] / 2**30:13.2f}" for engine in ENGINES))
    print(f"{'sent per iteration':22}" + "".join(f"{bytes_sent(model, run, e) / 2**30:13.2f}" for e in ENGINES))


if __name__ == "__main__":
    main()
