"""The travelling salesman: an action is a round trip through 20 towns, and each town is a step.

    python -m examples.gallery.travelling_salesman           # about two minutes on one core
    python -m examples.gallery.travelling_salesman --long    # more iterations: about eight minutes

A state is a map, and an action is the order in which its towns are visited. The 20 rows of a group begin in different
towns. The best round trip is the same from each of them, so the mean of the group is a baseline for all its rows (POMO,
Kwon et al. 2020, arXiv:2010.16011). Each of the other 19 towns is a step. The reward is minus the length.

The table has new maps. It says by how much trips of the most likely towns are longer than the best of 2-opt, which
improves the trips to the nearest neighbour from each of the 20 towns. The script writes travelling_salesman.png.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.distributions import Categorical

from grpo import ActionScores, GRPOConfig, GRPOTrainer
from grpo.checks import check_policy

TOWNS, WIDTH, HEADS, LAYERS = 20, 64, 4, 3
RANGES = -(2.0 ** torch.arange(HEADS).view(HEADS, 1, 1))  # how much each head of the attention minds distance
torch.backends.mha.set_fastpath_enabled(False)  # it takes a mask of real numbers for one of booleans


def make_maps(number: int, seed: int) -> Tensor:
    return torch.rand(number, TOWNS, 2, generator=torch.Generator().manual_seed(seed))


def along(values: Tensor, tours: Tensor) -> Tensor:
    """The rows of values [N, 20, F] in the order of indices [N, M]."""
    return values.gather(1, tours.unsqueeze(2).expand(-1, -1, values.shape[2]))


def lengths(maps: Tensor, tours: Tensor) -> Tensor:
    places = along(maps, tours)
    return (places - places.roll(-1, 1)).norm(dim=2).sum(1)


def travel(number: int, rows: int, choose: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Trips [B, G, 20] from different towns. `choose` maps first and last towns [B, G] and is_open [B, G, 20] to towns."""
    first = (torch.arange(rows) % TOWNS).expand(number, -1)
    tours, is_open = [first], torch.ones(number, rows, TOWNS, dtype=torch.bool)
    for _ in range(TOWNS - 1):
        is_open = is_open.scatter(2, tours[-1].unsqueeze(2), False)
        tours.append(choose(first, tours[-1], is_open))
    return torch.stack(tours, dim=2)


class Traveller(nn.Module):
    """The policy: an encoder of maps, and a pointer to one of the towns that are open."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.embed, self.nearness = nn.Linear(2, WIDTH), nn.Parameter(torch.tensor(5.0))
        self.query, self.key = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.glimpse = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def encode(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """What the policy knows of each town [B, 20, 64], and the distances [B, 20, 20]."""
        distances = torch.cdist(maps, maps)
        return self.encoder(self.embed(maps - 0.5), (RANGES * distances.unsqueeze(1)).flatten(0, 1)), distances

    def log_probs(self, encoded: tuple[Tensor, Tensor], first: Tensor, last: Tensor, is_open: Tensor) -> Tensor:
        """Of the next town [B, M, 20], from the first and the last towns [B, M] and the open ones [B, M, 20]."""
        towns, distances = encoded
        left = is_open.float() @ towns / is_open.sum(2, keepdim=True)  # their mean
        query = self.query(torch.cat([along(towns, first), along(towns, last), left], dim=2))
        closed = ~is_open.repeat_interleave(HEADS, dim=0)
        query = query + self.glimpse(query, towns, towns, attn_mask=closed, need_weights=False)[0]
        logits = 10 * (query @ self.key(towns).mT / WIDTH**0.5).tanh() - self.nearness * along(distances, last)
        return logits.masked_fill(~is_open, -torch.inf).log_softmax(2)

    @torch.no_grad()
    def generate_actions(self, states: Tensor, num_actions_per_state: int, *, greedy: bool = False) -> Tensor:
        encoded = self.encode(states)
        draw = (lambda logits: logits.argmax(2)) if greedy else (lambda logits: Categorical(logits=logits).sample())
        return travel(len(states), num_actions_per_state, lambda *towns: draw(self.log_probs(encoded, *towns)))

    def score_groups(self, states: Tensor, actions: Tensor | list[Tensor]) -> ActionScores:
        tours = nn.utils.rnn.pad_sequence(list(actions), batch_first=True)  # [B, G, 20]: groups may have lost rows
        before = tours[:, :, :-1]
        first, is_open = tours[:, :, :1].expand_as(before), nn.functional.one_hot(before, TOWNS).cumsum(2) == 0
        steps = [each.flatten(1, 2) for each in (first, before, is_open)]  # all steps of a group side by side
        log_probs = self.log_probs(self.encode(states), *steps).view_as(is_open)
        taken = log_probs.gather(3, tours[:, :, 1:].unsqueeze(3)).squeeze(3)  # [B, G, 19]
        taken = torch.cat([rows[: len(group)] for rows, group in zip(taken, actions, strict=True)])
        return ActionScores(log_probs=taken, mask=torch.ones_like(taken, dtype=torch.bool))

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.score_groups(states, actions.unsqueeze(1)).log_probs

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def two_opt(maps: Tensor, tours: Tensor) -> Tensor:
    """Reverse the part of each trip that saves most, as long as there is one."""
    place, most = torch.arange(TOWNS), torch.ones(())
    while most.max() > 1e-5:
        places = along(maps, tours)
        ways, steps = torch.cdist(places, places), (places - places.roll(-1, 1)).norm(dim=2)
        saved = steps.unsqueeze(2) + steps.unsqueeze(1) - ways - ways.roll((-1, -1), (1, 2))
        most, where = saved.where(place.unsqueeze(1) < place, 0).flatten(1).max(1, keepdim=True)
        start, end = where // TOWNS, where % TOWNS
        turned = torch.where((place > start) & (place <= end), start + 1 + end - place, place)
        tours = torch.where(most > 1e-5, tours.gather(1, turned), tours)
    return tours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1300, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--long", dest="iterations", action="store_const", const=6000, help="6000 iterations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy, maps = Traveller(), make_maps(500, seed=-1)
    print(check_policy(policy, maps[:3], num_samples=256, strict=True))
    config = GRPOConfig(group_size=TOWNS, lr_schedule="linear", seed=args.seed)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda maps, tours: -lengths(maps, tours))
    trainer.train(lambda number: make_maps(16, 10**6 * args.seed + number), num_iterations=args.iterations)
    ways, rows = torch.cdist(maps, maps), maps.repeat_interleave(TOWNS, dim=0)  # a row for each first town
    nearest = travel(len(maps), TOWNS, lambda _, last, is_open: along(ways, last).masked_fill(~is_open, 9).argmin(2))
    tours = {"nearest neighbour": nearest.flatten(0, 1), "2-opt": two_opt(rows, nearest.flatten(0, 1))}
    tours["GRPO"] = policy.generate_actions(maps, TOWNS, greedy=True).flatten(0, 1)
    found = {name: lengths(rows, each).view(-1, TOWNS) for name, each in tours.items()}
    shortest = found["2-opt"].amin(1).mean()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    print(f"\nlonger than the best of 2-opt, {len(maps)} new maps: from one town, and the best from all towns")
    for axis, (name, each) in zip(axes, found.items(), strict=True):
        print(f"{name:20s}{each[:, 0].mean() / shortest - 1:8.1%}{each.amin(1).mean() / shortest - 1:8.1%}")
        axis.plot(*maps[0, tours[name][each[0].argmin()]][torch.arange(-1, TOWNS)].T, "o-")
        axis.set(title=f"{name}: {each[0].min():.2f}", aspect="equal", xticks=[], yticks=[])
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "travelling_salesman.png", dpi=80)
    print(f"written: {args.folder}/travelling_salesman.png")


if __name__ == "__main__":
    main()
