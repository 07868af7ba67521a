"""Advice on everyday questions in four ways of speaking: pairs from which a chat model learns its client's.

An answer is brief or detailed, and casual or formal. Each of four clients wants one of the four ways; the
first two differ in both, and so do the last two. All of them want kind closing words and no curt ones.
So one model for all can learn to be kind, and must fail some client on the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from prefed.core.random_keys import Key
from prefed.data.record import Message, Record, Split


class Style(NamedTuple):
    """A way of speaking."""

    casual: bool
    brief: bool
    kind: bool = True

    def describe(self) -> str:
        """The style in words.

        >>> Style(casual=True, brief=False).describe()
        'casual and detailed'
        """
        return f"{'casual' if self.casual else 'formal'} and {'brief' if self.brief else 'detailed'}"


STYLES: Mapping[str, Style] = {
    "ada": Style(casual=True, brief=True),
    "ben": Style(casual=False, brief=False),
    "cleo": Style(casual=True, brief=False),
    "dan": Style(casual=False, brief=True),
}
"""Client → the style that it wants."""

PROMPTS = (
    "How can I cheer up a friend?",
    "What should I cook for my parents?",
    "How do I get better at chess?",
)
"""Questions that no pair has."""

TESTED = 12
"""So many of the topics, the last ones, are for test pairs alone."""

_LINES = """\
How can I sleep better? | go to bed at the same time every night
    the body likes a steady rhythm | a dark and quiet room helps as well
What should I eat for breakfast? | have some oats with fresh fruit
    oats keep you full until noon | a spoonful of nuts makes them tastier
How do I learn a language? | speak it for ten minutes every day
    short practice beats one long lesson | songs and films teach you the sounds
How can I save money? | write down everything that you spend
    most people lose money on small things | a monthly limit makes saving easier
What is a good first pet? | get a pair of guinea pigs
    they are gentle and easy to look after | two of them keep each other company
How do I keep my plants alive? | water them only when the soil is dry
    too much water harms the roots | a sunny window does the rest
How can I make new friends? | join a club that meets every week
    people grow close when they meet often | shared hobbies give you something to talk about
What should I do on a rainy day? | bake bread with someone you like
    the smell alone lifts the mood | the dough needs time, so you can play cards meanwhile
How do I stop being late? | leave ten minutes before you have to
    things always take longer than planned | packing your bag the night before saves time
How can I run faster? | do one short and quick run each week
    speed comes from training at speed | rest days let your legs recover
What gift can I bring to a dinner? | bring a small plant in a nice pot
    it lasts longer than flowers | the host does not need a vase for it
How do I write a good letter? | start with the thing that matters most
    readers lose patience quickly | reading it aloud shows you what to change
How can I feel less stressed? | take a slow walk without your phone
    quiet time calms the mind | fresh air makes it work even better
What is a good way to learn to cook? | make the same soup until it is perfect
    repetition teaches you what each step does | tasting often tells you what is missing
How do I clean my windows? | wipe them with water and a little vinegar
    vinegar removes grease without streaks | a cloudy day keeps them from drying too fast
How can I read more books? | read ten pages before you go to sleep
    a small habit is easy to keep | a book on the pillow reminds you of it
What should I pack for a hike? | take water, a map and a warm layer
    the weather can change within an hour | a snack keeps your spirits up
How do I ask for a raise? | bring a list of what you achieved
    facts are hard to argue with | a calm moment makes your boss listen
How can I take better photos? | move closer to what you want to show
    a full frame tells a clearer story | morning light is kinder than noon
What is a good hobby for the winter? | try knitting a simple scarf
    it keeps your hands busy and warm | you can wear what you made
How do I choose a bicycle? | ride three of them before you buy
    comfort cannot be seen in a shop window | the right saddle height spares your knees
How can I drink more water? | keep a full glass on your desk
    you drink what you can see | a slice of lemon makes it less dull
What should I do before an exam? | explain the subject to a friend
    you notice what you do not understand | an early night helps more than a late one
How do I train my dog to sit? | hold a treat above its nose and wait
    the dog sits down to see it better | a quick reward tells it what was right
How can I keep my desk tidy? | clear it for two minutes every evening
    small messes never become large ones | a drawer for odd things works wonders
What is a nice trip for a weekend? | take a train to a small town by a river
    slow travel is half of the fun | a room near the station saves you time
How do I remember names? | say the name aloud when you hear it
    what we say stays with us | a picture in your mind makes it stick
How can I get up earlier? | put the alarm on the other side of the room
    you have to stand up to stop it | morning light wakes you the rest of the way
What should I plant in spring? | sow some radishes in a sunny spot
    they are ready in four weeks | children love to pull them out
How do I make good coffee? | grind the beans just before you brew
    fresh grounds keep their aroma | water slightly below boiling tastes best
How can I calm a crying baby? | hold the baby close and hum softly
    a steady voice feels safe | a slow walk through the room helps too
What is a good sport for beginners? | start with swimming twice a week
    it trains the whole body gently | the water carries most of your weight
How do I fix a squeaky door? | rub a little soap on the hinges
    soap stops metal from grinding | moving the door spreads it evenly
How can I speak in front of people? | practise the first two sentences by heart
    a good start takes the fear away | a friendly face in the room helps you
What should I watch tonight? | pick an old comedy that you missed
    the good ones never grow old | friends on the sofa make it funnier
How do I cut onions without tears? | cool them for a while before you cut
    the cold keeps the sharp juice inside | a sharp knife does less damage
""".splitlines()
_TOPICS = tuple(
    tuple(part.strip() for part in f"{first}|{second}".split("|"))
    for first, second in zip(_LINES[::2], _LINES[1::2], strict=True)
)
"""A question, what to do, why, and what else there is to say."""

_OPENINGS = {
    True: ("Hey! ", "Oh, easy one! ", "Hey there! "),
    False: ("Certainly. ", "Thank you for asking. "),
}
_ADVICE = {
    True: ("Just {}.", "I'd say {}.", "You could totally {}."),
    False: ("I would recommend that you {}.", "It is advisable that you {}."),
}
_REASONS = {
    True: (" Basically, {}.", " You see, {}."),
    False: (" The reason is that {}.", " This is sensible because {}."),
}
_MORE = {True: (" Oh, and {}!", " Plus, {}!"), False: (" Furthermore, {}.", " In addition, {}.")}
_CLOSINGS = {
    (True, True): (" Have fun!", " You've got this!", " Good luck!"),
    (True, False): (" Whatever.", " Not my problem, though."),
    (False, True): (" I wish you every success.", " I hope that this is of help to you."),
    (False, False): (" There is nothing more to say.", " I do not wish to discuss it further."),
}


def generate(key: Key, *, train: int, test: int) -> list[Record]:
    """Pairs of the four clients, ``train`` and ``test`` of each; a prompt is one turn of a user.

    The chosen answer is in the client's style and the rejected one in another. No question of a test pair is
    one of a training pair.
    """
    records = []
    for client, style in STYLES.items():
        generator = key.at("advice", client).numpy()
        others = [Style(*signs) for signs in product((True, False), repeat=3) if Style(*signs) != style]
        parts: tuple[tuple[Split, int, Any], ...] = (
            ("train", train, _TOPICS[:-TESTED]),
            ("test", test, _TOPICS[-TESTED:]),
        )
        for split, count, topics in parts:
            order = np.concatenate(
                [generator.permutation(len(topics)) for _ in range(-(-count // len(topics)))]
            )
            for index in order[:count]:
                topic = topics[index]
                rejected = answer(generator, topic, others[int(generator.integers(len(others)))])
                chosen = answer(generator, topic, style)
                records.append(
                    Record((Message("user", topic[0]),), chosen, rejected, client=client, split=split)
                )
    return records


def answer(generator: np.random.Generator, topic: Sequence[str], style: Style) -> str:
    """An answer to the question of a topic, in a style."""

    def pick(options: Sequence[str]) -> str:
        return options[int(generator.integers(len(options)))]

    casual, brief, kind = style
    _, advice, reason, more = topic
    text = pick(_OPENINGS[casual]) + pick(_ADVICE[casual]).format(advice)
    if not brief:
        text += pick(_REASONS[casual]).format(reason) + pick(_MORE[casual]).format(more)
    return text + pick(_CLOSINGS[casual, kind])
