"""What the stories of the word problems are made of: names, things, and the forms of their sentences."""

from moe_int8.evals.demo.forms import Pattern

SHE = "Maya Nora Lena Ruth Alma Ivy Clara Edith Tessa Hanna Olga Wanda Bella Greta Lucy Mira Pia Rosa Sofia Vera"
HE = "Tom Ben Oscar Paul Felix Hugo Leo Max Noah Ralf Simon Victor Walter Adam Boris Carl David Emil Frank Georg"
THINGS = (
    "apples marbles stamps books pencils coins shells cards buttons beads stickers candles cookies plates bricks "
    "tickets flowers seeds stones ribbons"
)
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
PERCENT = (5, 10, 20, 25, 30, 40, 60, 75)

OPENINGS = ("{S} ", "Then {s} ", "Later {s} ", "After lunch {s} ", "The next day {s} ", "In the evening {s} ")
START = Pattern(
    "start",
    (
        ("{name} has ", "{name} owns ", "{name} starts with ", "At first {name} has ", "In the morning {name} has "),
        ("{n} {things}", "exactly {n} {things}", "a box of {n} {things}", "a collection of {n} {things}"),
        (".", " at home.", " in a drawer.", " on the table."),
    ),
)
GAIN = Pattern(
    "gain",
    (
        OPENINGS,
        ("buys ", "finds ", "gets ", "receives ", "collects "),
        ("{n} more", "another {n}", "{n} new ones"),
        (".", " at the market.", " from a friend.", " on the way home.", " at school."),
    ),
)
LOSE = Pattern(
    "lose",
    (
        OPENINGS,
        ("gives away ", "loses ", "sells ", "throws out ", "leaves behind "),
        ("{n} of them", "exactly {n} of them", "{n}"),
        (".", " at the market.", " on the way home.", " at school.", " without regret."),
    ),
)
GAIN_PACKS = Pattern(
    "gain_packs",
    (
        OPENINGS,
        ("buys ", "finds ", "gets ", "receives ", "collects "),
        (
            "{k} boxes with {n} {things} in each",
            "{k} bags of {n} {things} each",
            "{k} packs that hold {n} {things} each",
        ),
        (".", " at the market.", " from a friend.", " on the way home.", " at school."),
    ),
)
LOSE_PACKS = Pattern(
    "lose_packs",
    (
        OPENINGS,
        ("fills ", "gives away ", "sells ", "sends off "),
        (
            "{k} boxes with {n} {things} in each",
            "{k} bags of {n} {things} each",
            "{k} packs that hold {n} {things} each",
        ),
        (".", " at the market.", " on the way home.", " at school.", " without regret."),
    ),
)
TIMES = Pattern(
    "times",
    (
        OPENINGS,
        ("trades ", "swaps ", "exchanges "),
        ("all of them ", "the whole lot ", "everything "),
        ("for {k} times as many", "and ends up with {k} times as many"),
        (".", " at the market.", " at school."),
    ),
)
SHARE = Pattern(
    "share",
    (
        OPENINGS,
        ("splits ", "divides ", "sorts "),
        ("all of them ", "the whole lot ", "everything "),
        ("into {k} equal piles ", "evenly into {k} piles "),
        ("and keeps only one pile.", "and takes just one pile.", "and goes on with one pile."),
    ),
)
LOSE_PART = Pattern(
    "lose_part",
    (
        OPENINGS,
        ("gives away ", "loses ", "sells ", "throws out ", "leaves behind "),
        ("{part} of them", "{part} of the {things}", "{part} of everything"),
        (".", " at the market.", " on the way home.", " at school.", " without regret."),
    ),
)
GAIN_PERCENT = Pattern(
    "gain_percent",
    (
        OPENINGS,
        ("buys ", "finds ", "gets ", "receives ", "collects "),
        ("{k}% more {things}", "{k}% more of them", "another {k}% on top"),
        (".", " at the market.", " from a friend.", " at school."),
    ),
)
FRIEND = Pattern(
    "friend",
    (
        ("{friend} has ", "A friend called {friend} has ", "The neighbor {friend} has ", "At this point {friend} has "),
        ("{n} {things} more than {name}", "{n} more {things} than {name}"),
        (", and they put ", ", so they put ", ", and now they put "),
        ("both collections together.", "all their {things} together.", "everything together."),
    ),
)
ENDS = ("", " in the end", " now", " at the end of the story", " after all this", " at last")
HOW_MANY = Pattern(
    "how_many", (("How many {things} ", "What number of {things} "), ("does {name} have", "are there", "remain"), ENDS)
)
PRICE = Pattern(
    "price",
    (
        ("Each one is sold for ${k}. ", "They are sold for ${k} each. ", "The price of each is ${k}. "),
        ("How much money does {name} get", "How many dollars does {name} get", "How much does {name} earn"),
        ENDS,
    ),
)
DAYS = Pattern(
    "days",
    (
        ("{name} uses {k} a day. ", "Every day {k} of them are used. ", "Each day {name} uses {k}. "),
        ("How many days do they last", "For how many days is that enough", "After how many days are they used up"),
        ENDS,
    ),
)
