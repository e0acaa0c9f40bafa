"""Writes the prompts of the recipe: templates filled with subjects, some of them held out.

Usage: python configs/recipes/english/prompts.py --out runs/english/data

A subject is either trained on or held out, with all of its prompts. So held-out prompts ask in
words that training has seen, about what it has not seen. This file knows no model.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "english"
LABELLED = 320  # training prompts whose answers the labeller compares


@dataclass(frozen=True)
class Kind:
    """Subjects that can be asked for in the same ways."""

    templates: tuple[str, ...]  # with {} for the subject
    subjects: tuple[str, ...]
    held_out: tuple[str, ...]  # subjects that are never trained on


THINGS = Kind(
    templates=(
        "Write one sentence about {}.",
        "Describe {} in one sentence.",
        "In one sentence, what do you think of {}?",
        "Tell a friend about {} in one sentence.",
        "What is special about {}? Answer in one sentence.",
        "Write the first sentence of a letter about {}.",
    ),
    subjects=(
        "a small railway station",
        "a crowded beach",
        "an old library",
        "a broken umbrella",
        "the last day of summer",
        "a long winter",
        "a quiet street at night",
        "the first cup of coffee",
        "a thunderstorm",
        "an empty theatre",
        "a train that is late",
        "a garden in autumn",
        "a market on Saturday",
        "a bowl of soup",
        "a steep mountain path",
        "a noisy neighbour",
        "an orange cat",
        "a lost letter",
        "a city without cars",
        "a hospital waiting room",
        "a birthday cake",
        "a leaking roof",
        "an abandoned factory",
        "a lighthouse",
        "a school playground",
        "a cheap hotel room",
        "a foggy harbour",
        "an old pair of boots",
        "a traffic jam",
        "a new neighbour",
        "a family photograph",
        "a wooden chair",
        "a bus driver",
        "the sound of rain",
        "a village square",
        "a burnt dinner",
        "a football match",
        "a museum of clocks",
        "a narrow bridge",
        "a second-hand bicycle",
        "a frozen lake",
        "a street musician",
        "an early morning",
        "a dusty attic",
        "a patient teacher",
        "a field of sunflowers",
        "a cold classroom",
        "a box of tools",
        "a night train",
        "a fishing boat",
        "a forgotten password",
    ),
    held_out=(
        "a rainy weekend",
        "a stray dog",
        "a busy airport",
        "a bakery in the morning",
        "a broken watch",
        "the view from a tower",
        "a muddy river",
        "a retired doctor",
        "a wedding in the rain",
    ),
)

ACTIVITIES = Kind(
    templates=(
        "Tell a friend in one sentence what you think of {}.",
        "In one sentence, is {} worth the time?",
        "Give one piece of advice about {} in one sentence.",
        "Write one sentence about how {} feels.",
        "My sister has begun {}. What would you say to her in one sentence?",
    ),
    subjects=(
        "learning to swim",
        "baking bread",
        "working at night",
        "repairing old radios",
        "reading the news",
        "walking to work",
        "living alone",
        "playing chess",
        "growing tomatoes",
        "moving to another country",
        "running in the rain",
        "cooking for ten people",
        "writing a diary",
        "singing in a choir",
        "driving a truck",
        "camping in winter",
        "learning Latin",
        "cleaning the house",
        "keeping bees",
        "sharing a flat",
        "collecting stamps",
        "waiting in queues",
        "teaching children",
        "studying for exams",
        "painting walls",
        "riding a horse",
        "getting up early",
        "fishing",
        "playing the drums",
        "working from home",
        "eating alone",
        "climbing mountains",
        "saving money",
        "selling old books",
    ),
    held_out=(
        "learning the violin",
        "travelling by bus",
        "dancing in public",
        "building a boat",
        "looking after a puppy",
        "working on a farm",
    ),
)

COMPLAINTS = Kind(
    templates=(
        "A customer complains about {}. Answer in one sentence.",
        "You run a small shop. A customer is angry about {}. Write one sentence to them.",
        "Write one sentence of a review that mentions {}.",
        "What would you say to somebody who is upset about {}? Answer in one sentence.",
    ),
    subjects=(
        "a parcel that came late",
        "cold soup",
        "a scratched table",
        "the wrong size of shoes",
        "a loud hotel room",
        "a rude waiter",
        "a phone that never charges",
        "a missing button",
        "a high bill",
        "a cancelled flight",
        "stale bread",
        "slow internet",
        "a dirty window",
        "a lost suitcase",
        "a torn book",
        "a dead plant",
        "a noisy fridge",
        "an unfriendly email",
        "a broken zip",
        "an empty box",
        "a long queue",
        "a faded shirt",
        "a wobbly desk",
        "a bitter coffee",
        "a flat tyre",
    ),
    held_out=(
        "a cracked mug",
        "a late taxi",
        "a burnt pizza",
        "a watch that stopped",
        "a closed swimming pool",
    ),
)

NEWS = Kind(
    templates=(
        "{} What do you say? Answer in one sentence.",
        "{} Write me one sentence back.",
        "A friend writes: '{}' Reply in one sentence.",
        "{} How would you feel about that? Answer in one sentence.",
    ),
    subjects=(
        "I passed my driving test.",
        "I lost my keys again.",
        "My brother is getting married.",
        "We are moving to a smaller flat.",
        "My team lost the final.",
        "I start a new job on Monday.",
        "Our neighbour has bought a drum kit.",
        "I have a cold.",
        "My grandmother turned ninety.",
        "The concert was cancelled.",
        "I finished my first novel.",
        "My bicycle was stolen.",
        "We are expecting a baby.",
        "I failed my maths exam.",
        "My cat came home after a week.",
        "The heating does not work.",
        "I have learned to cook one dish.",
        "My flight leaves at four in the morning.",
        "I forgot my mother's birthday.",
        "I won a cake at the fair.",
        "My best friend is moving away.",
        "I planted forty trees.",
        "The teacher praised my drawing.",
        "I cannot sleep at night.",
        "It has been raining for two weeks.",
        "I dropped my phone into a lake.",
    ),
    held_out=(
        "I broke my arm.",
        "My daughter took her first steps.",
        "Our village gets a library.",
        "I missed the last train.",
    ),
)

KINDS = (THINGS, ACTIVITIES, COMPLAINTS, NEWS)


def rows(held_out: bool) -> Iterator[dict[str, object]]:
    """The rows of the training prompts, or of those that are held out."""
    for kind in KINDS:
        for subject in kind.held_out if held_out else kind.subjects:
            for template in kind.templates:
                question = template.format(subject)
                yield {
                    "data_source": DATA_SOURCE,
                    "prompt": [{"role": "user", "content": question}],
                    "question": question,
                    "subject": subject,
                }


def mixed(held_out: bool) -> list[dict[str, object]]:
    """The rows in an order in which the first ones are of many kinds, always the same."""
    return random.Random(0).sample(found := list(rows(held_out)), len(found))


def main() -> None:
    """Write the files of prompts; those that the labeller sees are a part of the training ones."""
    parser = argparse.ArgumentParser(description="Write the prompts of the recipe.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train = mixed(held_out=False)
    files = {"train": train, "labelled": train[:LABELLED], "held_out": mixed(held_out=True)}
    for name, rows_of_file in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of_file]
        file = out / f"{name}.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
