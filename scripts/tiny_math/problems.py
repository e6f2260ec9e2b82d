"""Generator of the tiny model's task: word problems over a price list, and needles in filler.

A *math* document states a price list, then asks questions with worked answers in GSM8K's format (`Question:`,
`Answer:`, a final `#### N`). Every question buys items that no earlier question bought, so each price must be read from
the list at the start of the context. A *needle* document is filler in which people's codes are stated; questions ask
for codes stated far before.

Everything is drawn from a `random.Random`: one seed, one data set. A fixed sixteenth of all question texts is held out
(`is_held_out`): training never asks them, `evaluation_set` asks nothing else.
"""
# ruff: noqa: SIM905 (word lists read better as words than as list literals)

import random
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MAX_NUMBER = 200
ANSWER_MARK = "####"
END = "<eos>"  # closes every answer, in examples too
HELD_OUT_SHARE = 16  # one question text in so many
PRICES_PER_LIST = 24
MOST_FACTS = 60  # of a needle document: their numbers must be different

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Ned Ola Pia Quin Rosa Sam Tess Uma Vic Wes Xena Yara "
    "Zoe Abel Bea Cora Dora Emil Faye Gus Hana Ivan Jade Karl Lena Max Nora Otto Paul Rita Sven Tara Ugo Vera Walt "
    "Amy Bob Carla Dirk Elsa Fred Greta Hans Inga Jack Kurt Lisa Mona Nils Olga Petra"
).split()
ITEMS = (
    "apples pens lamps books cups hats kites drums plums rings socks belts bells boxes brushes cakes candles chairs "
    "clocks coats combs dolls eggs fans flags forks gloves grapes hammers jars keys knives ladders lemons maps "
    "masks melons mirrors nails onions pears pillows pots ropes scarves spoons tents towels"
).split()
ADJECTIVES = (
    "old young quiet red green tall small bright wet slow blue long cold warm round empty heavy narrow proud gentle"
).split()
NOUNS = (
    "river baker house bridge garden horse teacher window market forest farmer road tower sailor letter dog valley "
    "doctor boat field"
).split()
VERBS = ("watches follows finds passes leaves likes visits draws hears remembers").split()
PLACES = ("near behind under beside above around").split()


class Segment(NamedTuple):
    text: str
    is_answer: bool


class Problem(NamedTuple):
    question: str
    steps: str
    answer: str  # what stands after '####'


class Prompt(NamedTuple):
    context: str  # prompts of one group share it
    question: str  # ends with 'Answer:'
    answer: str
    solution: str  # the worked answer that training would have shown
    depth: float | None = None  # needles: where the fact stands, 0 = start of the context

    @property
    def text(self) -> str:
        return self.context + self.question


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0


# --- word problems: each takes (rng, names, items, prices); None when the draw doesn't fit ---


def _times(quantity: int, item: str, price: int) -> str:
    # "<item> at <price>" stands word for word in the price list: a lookup is one induction step, however far back.
    return f"{quantity} {item} at {price} = {quantity * price}."


def _buy_two(rng, names, items, prices):
    q1, q2 = rng.randint(2, 9), rng.randint(2, 9)
    a, b = q1 * prices[0], q2 * prices[1]
    question = rng.choice(
        (
            f"{names[0]} buys {q1} {items[0]} and {q2} {items[1]}. How many dollars does {names[0]} pay in total?",
            f"{names[0]} orders {q1} {items[0]} and {q2} {items[1]}. What is the total bill in dollars?",
        )
    )
    return Problem(
        question,
        f"{_times(q1, items[0], prices[0])} {_times(q2, items[1], prices[1])} {a} + {b} = {a + b}.",
        str(a + b),
    )


def _change(rng, names, items, prices):
    q1, q2 = rng.randint(2, 9), rng.randint(2, 9)
    a, b = q1 * prices[0], q2 * prices[1]
    note = 100 if a + b <= 100 else 200
    goods = f"{q1} {items[0]} and {q2} {items[1]}"
    question = rng.choice(
        (
            f"{names[0]} buys {goods} and pays with {note} dollars. How much change is left?",
            f"{names[0]} has {note} dollars and buys {goods}. How many dollars are left?",
        )
    )
    bill = f"{_times(q1, items[0], prices[0])} {_times(q2, items[1], prices[1])} {a} + {b} = {a + b}."
    steps = f"{bill} {note} - {a + b} = {note - a - b}."
    return Problem(question, steps, str(note - a - b))


def _left_over(rng, names, items, prices):
    q = rng.randint(2, 9)
    a = q * prices[0]
    has = rng.randint(a, 100)
    question = rng.choice(
        (
            f"{names[0]} has {has} dollars and buys {q} {items[0]}. How many dollars are left?",
            f"{names[0]} takes {has} dollars to the shop and pays for {q} {items[0]}. How much is left?",
        )
    )
    return Problem(question, f"{_times(q, items[0], prices[0])} {has} - {a} = {has - a}.", str(has - a))


def _compare(rng, names, items, prices):
    q1, q2 = rng.randint(2, 9), rng.randint(2, 9)
    a, b = q1 * prices[0], q2 * prices[1]
    if a < b:
        return None
    question = (
        f"{names[0]} buys {q1} {items[0]} and {names[1]} buys {q2} {items[1]}. "
        f"How many dollars more does {names[0]} pay than {names[1]}?"
    )
    return Problem(
        question,
        f"{_times(q1, items[0], prices[0])} {_times(q2, items[1], prices[1])} {a} - {b} = {a - b}.",
        str(a - b),
    )


def _two_days(rng, names, items, prices):
    q1, q2 = rng.randint(2, 9), rng.randint(2, 9)
    total = q1 + q2
    question = rng.choice(
        (
            f"{names[0]} sells {q1} {items[0]} in the morning and {q2} more in the evening. "
            f"How many dollars does {names[0]} earn?",
            f"{names[0]} needs {q1} {items[0]} today and {q2} more tomorrow. What is the total bill in dollars?",
        )
    )
    return Problem(question, f"{q1} + {q2} = {total}. {_times(total, items[0], prices[0])}", str(total * prices[0]))


def _twice(rng, names, items, prices):
    q = rng.randint(2, 9)
    a, b = q * prices[0], 2 * q * prices[1]
    if a + b > MAX_NUMBER:
        return None
    question = (
        f"{names[0]} buys {q} {items[0]} and twice as many {items[1]}. How many dollars does {names[0]} pay in total?"
    )
    steps = (
        f"2 * {q} = {2 * q}. {_times(q, items[0], prices[0])} {_times(2 * q, items[1], prices[1])} {a} + {b} = {a + b}."
    )
    return Problem(question, steps, str(a + b))


def _coupon(rng, names, items, prices):
    q = rng.randint(2, 9)
    a = q * prices[0]
    off = rng.randint(1, min(a, 9))
    question = f"{names[0]} buys {q} {items[0]} with a coupon of {off} dollars. How many dollars does {names[0]} pay?"
    return Problem(question, f"{_times(q, items[0], prices[0])} {a} - {off} = {a - off}.", str(a - off))


def _three(rng, names, items, prices):
    q = [rng.randint(2, 9) for _ in range(3)]
    a, b, c = (n * p for n, p in zip(q, prices, strict=False))
    if a + b + c > MAX_NUMBER:
        return None
    goods = f"{q[0]} {items[0]}, {q[1]} {items[1]} and {q[2]} {items[2]}"
    question = f"{names[0]} buys {goods}. How many dollars does {names[0]} pay in total?"
    steps = " ".join(_times(n, i, p) for n, i, p in zip(q, items, prices, strict=False))
    return Problem(question, f"{steps} {a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.", str(a + b + c))


def _share(rng, names, items, prices):
    q, friends = rng.randint(2, 9), rng.randint(2, 6)
    a = q * prices[0]
    if a % friends:
        return None
    question = (
        f"{names[0]} buys {q} {items[0]} and {friends} friends share the bill. How many dollars does each friend pay?"
    )
    return Problem(question, f"{_times(q, items[0], prices[0])} {a} / {friends} = {a // friends}.", str(a // friends))


def _saving(rng, names, items, prices):
    q, per_day, days = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    need, saved = q * prices[0], per_day * days
    if need < saved:
        return None
    question = (
        f"{names[0]} saves {per_day} dollars a day for {days} days to buy {q} {items[0]}. How many dollars are missing?"
    )
    steps = f"{per_day} * {days} = {saved}. {_times(q, items[0], prices[0])} {need} - {saved} = {need - saved}."
    return Problem(question, steps, str(need - saved))


# (problem, how many different items it buys)
TEMPLATES = (
    (_buy_two, 2),
    (_change, 2),
    (_left_over, 1),
    (_compare, 2),
    (_two_days, 1),
    (_twice, 2),
    (_coupon, 1),
    (_three, 3),
    (_share, 1),
    (_saving, 1),
)


class ItemDeck:
    """Deals a list's items so that none comes twice before all have come once."""

    def __init__(self, rng: random.Random, items: list[str]):
        self.rng, self.items, self.deck = rng, items, []

    def draw(self, count: int) -> list[str]:
        if len(self.deck) < count:
            self.deck = self.rng.sample(self.items, len(self.items))
        taken, self.deck = self.deck[:count], self.deck[count:]
        return taken


def draw_problem(rng: random.Random, deck: ItemDeck, prices: dict[str, int], held_out: bool) -> Problem:
    """One problem whose items come from the deck and whose text is, or isn't, in the held-out share."""
    items: list[str] = []
    while True:
        template, count = rng.choice(TEMPLATES)
        if len(items) < count:
            items += deck.draw(count - len(items))
        problem = template(rng, rng.sample(NAMES, 2), items, [prices[i] for i in items])
        if problem is not None and is_held_out(problem.question) == held_out:
            return problem


def filler_sentence(rng: random.Random) -> str:
    # No names and no numbers: those belong to the facts that questions ask for.
    subject, thing = (f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2))
    kind = rng.random()
    if kind < 0.7:
        return f"The {subject} {rng.choice(VERBS)} the {thing}."
    if kind < 0.9:
        return f"The {subject} waits {rng.choice(PLACES)} the {thing}."
    return f"The {subject} is {rng.choice(ADJECTIVES)}."


def filler(rng: random.Random, sentences: int) -> str:
    return " ".join(filler_sentence(rng) for _ in range(sentences))


def price_list(rng: random.Random) -> dict[str, int]:
    return {item: rng.randint(2, 9) for item in rng.sample(ITEMS, PRICES_PER_LIST)}


def price_list_text(prices: dict[str, int]) -> str:
    return "Prices: " + " ".join(f"{item} at {price} dollars each." for item, price in prices.items())


def question_text(rng: random.Random, problem: Problem, most_filler: int) -> str:
    story = filler(rng, rng.randint(0, most_filler))
    return f"Question: {story + ' ' if story else ''}{problem.question}\nAnswer:"


def solution_text(problem: Problem) -> str:
    return f" {problem.steps} {ANSWER_MARK} {problem.answer} {END}"


def math_document(rng: random.Random) -> Iterator[Segment]:
    """An endless training document: a price list, then questions with worked answers."""
    prices = price_list(rng)
    deck = ItemDeck(rng, list(prices))
    most_filler = rng.randint(0, 12)
    yield Segment(price_list_text(prices) + "\n\n", False)
    while True:
        problem = draw_problem(rng, deck, prices, held_out=False)
        yield Segment(question_text(rng, problem, most_filler), False)
        yield Segment(solution_text(problem), True)
        yield Segment("\n\n", False)


def draw_codes(rng: random.Random, count: int) -> list[str]:
    """Codes of three numbers each; no number comes twice in one document, so each is followed by one other only."""
    numbers = rng.sample(range(10, MAX_NUMBER + 1), 3 * count)
    return [" ".join(map(str, numbers[3 * i : 3 * i + 3])) for i in range(count)]


def fact_text(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def code_answer(name: str, code: str) -> str:
    # The fact's own words again: as with the price list, the lookup is one induction step.
    return f" {fact_text(name, code)} {ANSWER_MARK} {code} {END}"


def code_question(name: str) -> str:
    return f"Question: What is the code of {name}?\nAnswer:"


def needle_document(rng: random.Random, length: int) -> Iterator[Segment]:
    """An endless training document of about `length` tokens, in rounds: facts at random places of a story, whose length
    is anything up to `length`, then one question about each fact.
    """
    names = rng.sample(NAMES, MOST_FACTS)
    facts = list(zip(names, draw_codes(rng, MOST_FACTS), strict=True))
    while True:
        count = min(len(facts), rng.randint(1, max(1, min(24, length // 48))))
        asked, facts = facts[:count], facts[count:]
        room = (length - 32 * count) * 12 ** -rng.random()  # log-uniform; 32 tokens are a fact and its question
        sentences = [filler_sentence(rng) for _ in range(max(0, int(room / 8.4)))]
        for fact in asked:
            sentences.insert(rng.randint(0, len(sentences)), fact_text(*fact))
        yield Segment(" ".join(sentences) + "\n\n", False)
        # Each code is asked once, so it can't be read from an earlier answer.
        for name, code in rng.sample(asked, count):
            yield Segment(code_question(name), False)
            yield Segment(code_answer(name, code), True)
            yield Segment("\n\n", False)


def echo_document(rng: random.Random, length: int, words: list[str]) -> Iterator[Segment]:
    """An endless training document of random words in which earlier passages come again: the plainest lookup, at every
    distance. From its third word on a repeated passage is determined by what stands before it.
    """
    said = rng.choices(words, k=rng.randint(24, max(24, length // 2)))
    yield Segment(" ".join(said), False)
    while True:
        size = rng.randint(6, 20)
        start = rng.randrange(len(said) - size)
        passage = said[start : start + size]
        yield Segment(" " + " ".join(passage[:2]), False)
        yield Segment(" " + " ".join(passage[2:]), True)
        # A few new words keep two passages apart.
        yield Segment(" " + " ".join(rng.choices(words, k=rng.randint(1, 4))), False)


# --- evaluation ---


def evaluation_set(groups: int, per_group: int, seed: int) -> list[Prompt]:
    """Held-out prompts. A group shares its price list and 5 to 8 worked examples; its questions buy items no example
    bought.
    """
    prompts = []
    for group in range(groups):
        rng = random.Random(f"evaluation {seed} {group}")
        prices = price_list(rng)
        order = rng.sample(list(prices), len(prices))
        shown, asked = order[:-6], order[-6:]  # the examples leave six items for the questions
        deck = ItemDeck(rng, shown)
        most_filler = rng.randint(2, 12)
        context = price_list_text(prices) + "\n\n"
        for _ in range(rng.randint(5, 8)):
            example = draw_problem(rng, deck, prices, held_out=False)
            context += question_text(rng, example, most_filler) + solution_text(example) + "\n\n"
        for _ in range(per_group):
            problem = draw_problem(rng, ItemDeck(rng, asked), prices, held_out=True)
            question = question_text(rng, problem, most_filler)
            prompts.append(Prompt(context, question, problem.answer, solution_text(problem)))
    return prompts


def needle_set(length: int, depths: list[float], contexts: int, seed: int) -> list[Prompt]:
    """Contexts of about `length` words with one person's code at each of the rising `depths`, and a question about
    each.
    """
    prompts = []
    for index in range(contexts):
        rng = random.Random(f"needle {seed} {length} {index}")
        codes = dict(zip(rng.sample(NAMES, len(depths)), draw_codes(rng, len(depths)), strict=True))
        sentences, words = [], 0
        while words < length - 9 * len(depths) - 12:
            sentences.append(filler_sentence(rng))
            words += sentences[-1].count(" ") + 2
        stories = len(sentences)
        for earlier, (depth, name) in enumerate(zip(depths, codes, strict=True)):
            sentences.insert(round(depth * stories) + earlier, fact_text(name, codes[name]))
        context = " ".join(sentences) + "\n\n"
        for depth, (name, code) in zip(depths, codes.items(), strict=True):
            prompts.append(Prompt(context, code_question(name), code, code_answer(name, code), depth))
    return prompts


def final_answer(text: str) -> str | None:
    """What stands after the last '####' of an answer, up to its end mark; None when there is no '####'."""
    text = text.split(END)[0]
    if ANSWER_MARK not in text:
        return None
    return " ".join(text.rsplit(ANSWER_MARK, 1)[1].split())
