"""Word-level tokenizer of the tiny model: a word, a number up to 200 or a sign is one token; white space is nothing.

`save` writes the same rule as a `tokenizer.json`, so Hugging Face's `AutoTokenizer` and SGLang read text the same way.
"""

import json
import random
import re
from pathlib import Path

from tiny_math import problems

PATTERN = r"####|[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]"
SPECIAL = ["<bos>", "<eos>", "<unk>"]
BOS, EOS, UNKNOWN = range(3)
_split = re.compile("<eos>|" + PATTERN).findall  # Hugging Face reads special tokens before the pattern


def build_vocabulary() -> dict[str, int]:
    """All words the generator can say: its word lists, the numbers, and the words of every template (met in a seeded
    sample).
    """
    rng = random.Random("vocabulary")
    words = set(
        problems.NAMES + problems.ITEMS + problems.ADJECTIVES + problems.NOUNS + problems.VERBS + problems.PLACES
    )
    words.update(_split(problems.filler(rng, 500)))
    words.update(_split(problems.fact_text("", "") + problems.code_question("")))
    prices = problems.price_list(rng)
    words.update(_split(problems.price_list_text(prices)))
    deck = problems.ItemDeck(rng, list(prices))
    for _ in range(5000):
        problem = problems.draw_problem(rng, deck, prices, held_out=False)
        words.update(_split(problems.question_text(rng, problem, 0) + problems.solution_text(problem)))
    numbers = [str(n) for n in range(problems.MAX_NUMBER + 1)]
    return {word: index for index, word in enumerate(SPECIAL + numbers + sorted(words - set(numbers) - set(SPECIAL)))}


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int]):
        self.ids = vocabulary
        self.words = sorted(vocabulary, key=vocabulary.get)
        self.stop_id = vocabulary[problems.END]

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Token ids without the leading `<bos>`; KeyError names a word that isn't in the vocabulary."""
        ids = self.ids
        return [ids[word] for word in _split(text)]

    def decode(self, token_ids) -> str:
        return " ".join(self.words[i] for i in token_ids)

    def save(self, directory: Path) -> None:
        def special(index):
            return dict(
                id=index,
                content=SPECIAL[index],
                single_word=False,
                lstrip=False,
                rstrip=False,
                normalized=False,
                special=True,
            )

        bos = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}
        description = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [special(i) for i in range(len(SPECIAL))],
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Removed", "invert": True},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {SPECIAL[BOS]: {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}},
            },
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": self.ids, "unk_token": SPECIAL[UNKNOWN]},
        }
        (directory / "tokenizer.json").write_text(json.dumps(description, indent=0) + "\n")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "unk_token": SPECIAL[UNKNOWN],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 16384,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        return cls(json.loads((Path(directory) / "tokenizer.json").read_text())["model"]["vocab"])
