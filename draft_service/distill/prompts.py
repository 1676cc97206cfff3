"""What the target is asked to make training text: conversations from templates over topics, and a held-out set.

The built-in prompts are drawn at random, but the n-th of a seed is always the same: a resumed run goes on where it was.
`HELD_OUT` are written by hand, from no template, and are never trained on.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from draft_service.distill.held_out import HELD_OUT
from draft_service.distill.topics import (
    CITIES,
    COUNTRIES,
    ITEMS,
    JOBS,
    LANGUAGES,
    NAMES,
    PLACES,
    PROGRAMS,
    QUESTIONS,
    TOPICS,
)

Conversation = list[dict[str, str]]
__all__ = ["HELD_OUT", "Conversation", "built_in", "follow_up", "from_file"]

EXPLAIN = (
    "Explain {topic} to a ten-year-old.",
    "Explain {topic} in simple terms.",
    "What is {topic}?",
    "What is {topic} and why does it matter?",
    "Tell me about {topic}.",
    "Write a short paragraph about {topic}.",
    "Give me a brief introduction to {topic}.",
    "How does {topic} affect everyday life?",
    "What are the main challenges of {topic}?",
    "Describe the history of {topic} in one paragraph.",
    "Why do people care about {topic}?",
    "Can you give me an example of {topic}?",
    "What should a beginner know about {topic}?",
    "What is the difference between {topic} and {topic2}?",
    "Compare {topic} and {topic2}.",
    "What are the advantages and disadvantages of {topic}?",
    "Is {topic} a good thing? Give arguments for both sides.",
    "Who are some important people in the field of {topic}?",
    "What common mistakes do people make about {topic}?",
    "i want to learn about {topic} where do i start",
    "Define {topic} in one sentence.",
    "Answer briefly: what is {topic}?",
    "How has {topic} changed over the last fifty years?",
    "What does the future of {topic} look like?",
)
LISTS = (
    "List five facts about {topic}.",
    "Give me three tips for {topic}.",
    "What are the top 5 things to know about {topic}?",
    "List the pros and cons of {topic}.",
    "Give me ten ideas for a project about {topic}.",
    "Write a list of questions to ask an expert on {topic}.",
    "Name five {item}.",
    "List 10 {item}.",
    "Make a table of three {item} and what makes each one special.",
    "Suggest a few {item} for a beginner.",
    "What are some {item} that are easy to find in {place}?",
    "Write step-by-step instructions for getting started with {topic}.",
    "Make a checklist for a {job} who has to prepare a talk on {topic}.",
    "Create a one-week plan for learning about {topic}.",
)
WRITE = (
    "Write a short story about a {job} in {place}.",
    "Write a short story about {name}, a {job} who discovers a secret in {place}.",
    "Write a poem about {topic}.",
    "Write a haiku about {place}.",
    "Write a four-line rhyme about a {job}.",
    "Write a dialogue between a {job} and a {job2} about {topic}.",
    "Write the opening paragraph of a novel set in {place}.",
    "Write a funny story about {name} and {name2}, who get lost in {place}.",
    "Write a speech by a {job} about {topic}.",
    "Write a product description for a new kind of {item1}.",
    "Write a blog post introduction about {topic}.",
    "Write a tweet about {topic}.",
    "Write a news headline and first paragraph about {topic}.",
    "Write a persuasive essay on why {topic} matters.",
    "Write a letter from {name} to {name2} about {topic}.",
    "Write a diary entry of a {job} who spent the day in {place}.",
    "Describe {place} so that a reader can picture it.",
    "Continue this story: {name} opened the door and saw {place}.",
    "Come up with a title and a plot for a film about a {job}.",
    "Write a bedtime story with a {job} and a talking animal.",
)
MAIL = (
    "Write an email to my boss asking for a day off because of {topic}.",
    "Write a polite email to a {job} asking for advice about {topic}.",
    "Draft a thank-you note to {name}, who helped me with {topic}.",
    "Write a cover letter for a job as a {job}.",
    "Write a short invitation to an event about {topic} in {city}.",
    "Write a complaint to a shop about a broken {item1}.",
    "Write a reply to {name}, who asked whether I can come to {city} next week.",
    "Write a message to remind my team of the meeting about {topic} on {day}.",
    "Write a job advertisement for a {job} in {city}.",
    "Write a short biography of {name}, a {job} from {city}.",
)
ADVICE = (
    "How do I become a {job}?",
    "What does a {job} do all day?",
    "What skills does a {job} need?",
    "I'm a {job} and I feel tired all the time. What can I do?",
    "How can I get better at {topic}?",
    "My friend {name} doesn't want to talk about {topic}. What should I do?",
    "Plan a weekend in {city} for a family with two children.",
    "What should I pack for a trip to {country}?",
    "What is the best time of year to visit {country}?",
    "Give me a simple recipe with {food} and {food2}.",
    "How do I cook {food}?",
    "What can I make for dinner with {food}, {food2} and rice?",
    "How much {food} should I eat in a week?",
    "How do I teach {topic} to children?",
    "I have a job interview as a {job} on {day}. How do I prepare?",
    "How do I stay motivated when working on {topic}?",
    "Should I choose a career as a {job} or as a {job2}?",
    "What gift should I buy for a {job}?",
    "hi, can you help me with {topic}?",
    "I need help with {topic}",
    "Tell me a joke about a {job}.",
    "What questions should I ask before I move to {city}?",
)
FACTS = (
    "What is the capital of {country}?",
    "Which language do people speak in {country}?",
    "Tell me three interesting facts about {country}.",
    "Where is {city}?",
    "What is {city} famous for?",
    "Which countries border {country}?",
    "Is {city} the capital of {country}?",
    "What is the population of {city}?",
    "What food is {country} known for?",
    "Give me a short history of {country}.",
    "Translate to French: I would like to visit {city}.",
    "Translate into Spanish: Where is the {job}?",
    "How do you say '{topic}' in German?",
    "{question}",
    "{question} Answer in one sentence.",
    "{question} Explain step by step.",
    "{question}",
    "I have a question. {question}",
    "{question} Keep it short.",
    "{question} Give an example.",
)
CODE = (
    "Write a {language} function that {program}.",
    "Write a {language} program that {program}.",
    "How do I write code in {language} that {program}?",
    "Implement a function in {language} which {program}. Explain how it works.",
    "Write a unit test for a {language} function that {program}.",
    "Show me a short {language} example that {program}.",
    "Write a Python function that {program}.",
    "Write a Python function that {program}. Add a docstring and type hints.",
    "Write a Python class with methods to do the following: it {program}.",
    "Give me pseudocode for an algorithm that {program}.",
    "Explain the time complexity of a function that {program}.",
    "What is wrong with my {language} code? It should be a function that {program}, but it returns nothing.",
)
MATHS = (
    "What is {a} + {b}?",
    "What is {a} times {c}?",
    "Calculate {a} - {c}.",
    "{name} has {c} apples and buys {d} more. How many apples does {name} have now?",
    "A train travels {a} km in {c} hours. What is its average speed?",
    "If a book costs {c} dollars, how much do {d} books cost?",
    "{name} is {c} years old. {name2} is {d} years older. How old is {name2}?",
    "What is {c}% of {a}?",
    "Solve for x: {c}x + {d} = {a}.",
    "Is {a} a prime number?",
    "What is the area of a rectangle with sides {c} and {d}?",
    "List the first {c} multiples of {d}.",
    "Sort these numbers in ascending order: {a}, {b}, {c}, {d}.",
    "There are {c} {food}s in a box. How many are there in {d} boxes? Show your work.",
    "Convert {c} kilometers to miles.",
    "What is the next number in the sequence {c}, {c2}, {c3}?",
    "Explain how to add fractions such as 1/{c} and 1/{d}.",
    "A {job} earns {a} dollars a week and spends {b}. How much is left?",
)
REWRITE = (
    "Rewrite this sentence to be more formal: {sentence}",
    "Rewrite the sentence in the past tense: {sentence}",
    "Correct the grammar: {sentence}",
    "Make this sentence shorter: {sentence}",
    "Paraphrase: {sentence}",
    "What is the sentiment of this text, positive or negative? {sentence}",
    "Classify the topic of this sentence: {sentence}",
    "Turn this into a question: {sentence}",
    "Find the nouns in this sentence: {sentence}",
    "Summarize in five words: {sentence} {sentence2}",
    "Combine these two sentences into one: {sentence} {sentence2}",
    "Extract the names and places as JSON: {sentence} {sentence2}",
    "Continue the text: {sentence}",
    "Read the text and answer the question. Text: {sentence} {sentence2} Question: who is it about?",
)
SENTENCES = (
    "{name} went to {city} to work as a {job}.",
    "The {job} said that {topic} was the hardest part of the year.",
    "me and {name} was thinking about {topic} since {day}.",
    "I can't believe how good the {food} was at {place}!",
    "Nobody in {city} had ever seen anything like {place}.",
    "Our meeting about {topic} has been moved to {day} because {name} is in {country}.",
    "The new {item1} arrived broken and the {job} never called back.",
    "{name} loves {topic}, but {name2} would rather talk about {topic2}.",
    "Last {day}, a {job} from {country} found {c} coins near {place}.",
    "{city} is a beautiful city, and its {food} is better than anywhere else in {country}.",
)
FOODS = (
    *("apple", "potato", "tomato", "carrot", "chicken", "egg", "cheese", "onion", "banana", "lentil", "mushroom"),
    *("pumpkin", "salmon", "tofu", "spinach", "bean", "lemon", "pepper", "pasta", "bread", "avocado", "cabbage"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS = (
    *(
        "backpack",
        "lamp",
        "coffee machine",
        "bicycle",
        "notebook",
        "chair",
        "umbrella",
        "phone case",
        "teapot",
        "watch",
    ),
    *("keyboard", "tent", "jacket", "water bottle", "toaster", "guitar", "garden tool", "board game", "mattress"),
)
# Weights: how often each kind of prompt is drawn.
KINDS = (
    (EXPLAIN, 22),
    (LISTS, 12),
    (WRITE, 15),
    (MAIL, 7),
    (ADVICE, 14),
    (FACTS, 12),
    (CODE, 9),
    (MATHS, 5),
    (REWRITE, 5),
)
SAME_CONVERSATION = (
    "Can you explain that more simply?",
    "Give me an example.",
    "Make it shorter.",
    "Why?",
    "Thanks! Can you tell me more?",
    "Write it as a list.",
    "Are you sure?",
    "What should I do next?",
    "Summarize your answer in one sentence.",
    "Rewrite your answer for a child.",
    "What is the most important point?",
    "Now write it as a poem.",
)
NEW_CONVERSATION = (
    "Summarize the following text:\n\n{text}",
    "Summarize this in one sentence: {text}",
    "Rewrite the following text in simpler words:\n{text}",
    "Make this text more formal:\n\n{text}",
    "What are the key points of this text?\n\n{text}",
    "Correct any mistakes in the following text, and repeat it: {text}",
    "Write a title for this text: {text}",
    "Here is a text.\n\n{text}\n\nWrite three questions that it answers.",
)


def built_in(seed: int) -> Iterator[Conversation]:
    """Single-turn conversations without end, all different."""
    rng = random.Random(seed)
    kinds, weights = zip(*KINDS, strict=True)
    seen = {conversation[-1]["content"] for conversation in HELD_OUT}
    while True:
        text = _fill(rng.choice(rng.choices(kinds, weights)[0]), rng)
        if text not in seen:
            seen.add(text)
            yield [{"role": "user", "content": text}]


def from_file(path: Path) -> list[Conversation]:
    """One single-turn conversation per line that is not empty."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [[{"role": "user", "content": line}] for line in lines if line]


def follow_up(conversation: Conversation, reply: str, rng: random.Random) -> Conversation:
    """What may be asked after a reply: a second turn, or a new conversation about the reply's text."""
    if rng.random() < 0.5:
        answer = {"role": "assistant", "content": reply}
        return [*conversation, answer, {"role": "user", "content": rng.choice(SAME_CONVERSATION)}]
    return [{"role": "user", "content": rng.choice(NEW_CONVERSATION).format(text=reply)}]


def _fill(template: str, rng: random.Random) -> str:
    fields: dict[str, Sequence[str]] = {
        "topic": TOPICS,
        "topic2": TOPICS,
        "item": ITEMS,
        "item1": THINGS,
        "job": JOBS,
        "job2": JOBS,
        "place": PLACES,
        "city": CITIES,
        "country": COUNTRIES,
        "name": NAMES,
        "name2": NAMES,
        "food": FOODS,
        "food2": FOODS,
        "day": DAYS,
        "question": QUESTIONS,
        "language": LANGUAGES,
        "program": PROGRAMS,
    }
    values: dict[str, str | int] = {key: rng.choice(words) for key, words in fields.items()}
    c, d = rng.randint(2, 20), rng.randint(2, 12)
    values |= {"a": rng.randint(20, 500), "b": rng.randint(10, 300), "c": c, "d": d, "c2": c + d, "c3": c + 2 * d}
    sentence: Callable[[], str] = lambda: rng.choice(SENTENCES).format(**values)  # noqa: E731
    return template.format(**values, sentence=sentence(), sentence2=sentence())
