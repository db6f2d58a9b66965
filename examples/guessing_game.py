"""Train an agent on a user who stays as it is: the agent guesses a number, and the user says higher, lower or yes.

    python -m examples.guessing_game               # three seeds, some minutes each on one core; nothing is downloaded
    python -m examples.guessing_game --seeds 0
    python -m examples.guessing_game --user model  # the user is a frozen language model

A conversation has two seats. The agent is the trained policy: a Qwen3 model of 0.05 million parameters with 18 tokens, without
any warm-up. The user is a plain function of the messages, or a second model, which has first imitated the function. Either way,
what the user says is context for the agent, and training the agent does not change the user. The user has a number from 0 to 9
in mind, and the agent has four guesses. Its reward is 1 for the right number, and 0.1 less for each guess before.

Without listening, four guesses find four numbers of ten. Binary search finds all ten. The script prints how often the number is
found by the untrained agent, without listening, by GRPO and by binary search, and shows a game.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.agents import AgentPolicy, Chat, Conversation, EnvironmentReward, Message, Seat
from adapters.llm import HFPolicy, SamplingConfig
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig

MARKS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = ["higher", "lower", "yes"]
TOKENS = [*MARKS, *WORDS, *"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_GUESSES = 4
NUMBERS = list(range(10))


def user(messages: list[Message]) -> str:
    """The user's answer to the last message. The first one says which number the user has in mind."""
    number, guess = messages[0]["content"], messages[-1]["content"]
    return "yes" if guess == number else "higher" if guess < number else "lower"


async def play(chat: Chat, number: int) -> float:
    """One game. The agent sees all but the number. The reward belongs to the last guess."""
    secret: Message = {"role": "system", "content": str(number)}
    messages: list[Message] = [{"role": "user", "content": "yes"}]  # ready
    for num_before in range(NUM_GUESSES):
        guess = (await chat.reply(messages, seat="agent")).message
        answer = (await chat.reply([secret, {**guess, "role": "user"}], seat="user")).message["content"]
        if answer == "yes":
            return 1 - 0.1 * num_before
        messages = [*messages, guess, {"role": "user", "content": answer}]
    return 0.0


def make_model() -> HFPolicy:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    chats = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", extra_special_tokens=MARKS[2:]
    )
    chats.add_tokens(WORDS)
    chats.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.14,  # 1 / sqrt(hidden_size)
        bos_token_id=None,
        eos_token_id=1,
    )
    return HFPolicy(Qwen3ForCausalLM(config), chats, sampling=SamplingConfig(max_new_tokens=3))


def make_frozen_user(num_iterations: int = 120) -> HFPolicy:
    """A model that answers each guess for each number as `user` does."""
    model = make_model()
    asked = [
        [{"role": "system", "content": str(number)}, {"role": "user", "content": str(guess)}]
        for number in NUMBERS
        for guess in NUMBERS
    ]
    given = model.demonstrations(asked, [user(messages) for messages in asked])
    trainer = GRPOTrainer(
        config=GRPOConfig(learning_rate=1e-2), policy=model, reward_model=lambda _, rows: [0.0] * len(rows)
    )
    trainer.train(None, demonstrations=given, num_iterations=num_iterations)
    return model


def make_policy(who: HFPolicy | Callable[[list[Message]], str] = user) -> AgentPolicy:
    seats = [Seat(name="agent"), Seat(name="user", policy=who)]
    return AgentPolicy(make_model(), play, seats=seats, max_turns=NUM_GUESSES, concurrency=256)


def share_found(policy: AgentPolicy, num_games: int = 30) -> float:
    """How often the agent finds the number, over games about each number."""
    policy.eval()
    rows = [row for group in policy.generate_actions(NUMBERS, num_games) for row in group]
    return sum(row.reward > 0 for row in rows) / len(rows)


def halving(low: int = 0, high: int = 9, num_guesses: int = NUM_GUESSES) -> int:
    """How many of the numbers from low to high binary search finds."""
    if low > high or num_guesses == 0:
        return 0
    middle = (low + high) // 2
    return 1 + halving(low, middle - 1, num_guesses - 1) + halving(middle + 1, high, num_guesses - 1)


def train(seed: int, iterations: int, *, is_model: bool = False) -> tuple[float, float, Conversation]:
    """How often the number is found before and after, and a game about 7."""
    torch.manual_seed(seed)
    policy = make_policy(make_frozen_user() if is_model else user)
    before = share_found(policy)
    config = GRPOConfig(
        group_size=16,
        batch_size=40,
        learning_rate=3e-3,
        seed=seed,
        advantage=AdvantageConfig(credit="return_to_go"),
        # without the bonus, the agent settles on a few numbers and does not listen
        objective=ObjectiveConfig(entropy_coef=0.02, entropy_estimator="score_function"),
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward(per_turn=True))
    trainer.train(NUMBERS, num_iterations=iterations)
    ((game,),) = policy.generate_actions([7], 1)
    return before, share_found(policy), game


def arguments(typed: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings of a run, from what was typed behind the script's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=160, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--user", choices=["function", "model"], default="function", help="who answers")
    return parser.parse_args(typed)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # more threads do not help a model this small
    deaf, best = NUM_GUESSES / len(NUMBERS), halving() / len(NUMBERS)
    lines = ["| seed | untrained | without listening | GRPO | binary search | seconds |", "|---|---|---|---|---|---|"]
    for seed in args.seeds:
        start = time.perf_counter()
        before, after, game = train(seed, args.iterations, is_model=args.user == "model")
        seconds = time.perf_counter() - start
        lines.append(f"| {seed} | {before:.0%} | {deaf:.0%} | {after:.0%} | {best:.0%} | {seconds:.0f} |")
        print("\n" + "\n".join(lines) + "\n", flush=True)
    for message in game.messages:
        print(message["role"], message["content"])


if __name__ == "__main__":
    main()
