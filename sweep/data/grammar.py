"""The rules of the built-in synthetic stories; `sweep.data.synthetic` gives them their meaning.

In an alternative, `[rule]` expands a rule, `<variable>` draws a value, says it and keeps it,
`<variable:given>` draws from the values that belong to the kept value of `given`, and `{form}` says
a kept value again or a pronoun that agrees with it. Of n alternatives (or values) the first has
weight n and the last weight 1.

The alternatives of a rule differ in their first word, also from what follows where one of them is
empty. So a reader with one word of foresight knows each choice, and every story has exactly one
derivation (the tests check this on the rules themselves). A change here is a new GRAMMAR_VERSION.
"""

GRAMMAR_VERSION = 1
START = "story"

RULES: dict[str, tuple[str, ...]] = {
    "story": ("[opening] [wish] [scene] [twist]",),
    "opening": (
        "There was a [trait] <gender> named <name:gender>.",
        "Once upon a time, there was a [trait] <gender> named <name:gender>.",
        "One day, a [trait] <gender> named <name:gender> [woke].",
    ),
    "trait": ("little", "", "kind", "happy", "brave", "clever", "shy", "funny", "small", "quiet"),
    "woke": ("woke up [early]", "felt very [bored]", "sat by the <seat>", "looked for some fun"),
    "early": ("early", "late", "with a smile", "in a good mood"),
    "bored": ("bored", "lonely", "excited", "curious"),
    "wish": ("{He} [had] [very] <look> <thing> [gift].",),
    "had": ("had a", "loved {his}", "got a", "liked {his}", "found a", "wanted a"),
    "very": ("", "new", "very", "nice,"),
    "gift": ("", "from {his} <giver>", "for {his} birthday", "that was [special]"),
    "special": ("very special", "so soft", "almost like magic", "full of stars"),
    "scene": (
        "{name} [began] <play:thing> the {look} {thing} [manner].",
        "",
        "[when] {he} [went] the <place> [company]. [sight]",
    ),
    "when": ("Then", "After [meal],", "Later,", "Today", "On a [weather] morning,"),
    "meal": ("lunch", "breakfast", "school", "a nap", "dinner"),
    "weather": ("sunny", "warm", "windy", "cold", "cloudy"),
    "went": ("went to", "walked to", "ran to", "came to", "hurried to", "rode {his} bike to"),
    "company": ("", "with {his} <partner>", "all alone", "to have fun"),
    "sight": ("", "At the {place}, {he} saw a <sight:place>. [liked]"),
    "liked": ("", "What a [wonder] {sight}!", "It was [wonder]."),
    "wonder": ("big", "lovely", "strange", "pretty", "tiny", "silly"),
    "began": ("wanted to", "started to", "liked to", "tried to", "had to"),
    "manner": ("", "all day", "again and again", "with joy", "[near] the <spot>"),
    "near": ("near", "by", "behind", "under"),
    "twist": (
        "But the {thing} [vanished]! [search] [found] [lesson]",
        "Suddenly, the {thing} [broke]. [sad] [repair] [thanks]",
        "A [size] <friend> [came] and [asked] [answer]",
        "Soon it began to [storm]. [shelter]",
    ),
    "vanished": ("was gone", "disappeared", "fell into the <hole>", "got lost"),
    "search": ("", "{He} looked [where] the <spot2>. [nothing]"),
    "where": ("under", "behind", "inside", "around"),
    "nothing": ("", "It was not there."),
    "found": ("{His} <helper> [saw] it and gave it back.", "At last, {he} found it [place2]."),
    "saw": ("saw", "found", "reached for", "fetched"),
    "place2": ("in the grass", "under a leaf", "on a rock", "by a tall tree", "near home"),
    "lesson": (
        "{name} was <feeling> and hugged the {thing}.",
        "Now {he} kept the {look} {thing} [safe].",
    ),
    "safe": ("safe", "close", "in a box", "under {his} bed"),
    "broke": ("broke", "got stuck", "tore", "became dirty", "stopped"),
    "sad": ("", "{name} [cried].", "Oh no!"),
    "cried": ("cried", "was very sad", "sat down", "felt [bad]"),
    "bad": ("angry", "bad", "scared", "sorry"),
    "repair": ("{His} <helper> [fixed] it with a <tool>.", "So {he} [fixed] it with a <tool>."),
    "fixed": ("fixed", "mended", "cleaned", "helped", "touched"),
    "thanks": (
        "Now the {thing} was [good].",
        "{name} said, \"Thank you!\" and smiled.",
        "In the end, {he} was <feeling>.",
    ),
    "good": ("good", "clean", "pretty", "just like new"),
    "size": ("big", "", "small", "friendly", "hungry", "brown", "white"),
    "came": ("came", "walked up", "jumped out", "stopped", "waved"),
    "asked": ("said, [speech]", "looked at the {thing}.", "wanted to help."),
    "speech": ("\"Can I <play:thing> it too?\"", "\"Hello!\"", "\"What is that?\""),
    "answer": (
        "{name} [shared] the {friend}. [friends]",
        "\"Yes!\" said {name}. [friends]",
        "\"No!\" said {name}. The {friend} was <sorrow>. [sorry]",
    ),
    "shared": ("smiled at", "played with", "was not afraid of", "gave a <food> to", "hugged"),
    "friends": (
        "They became best friends.",
        "{name} and the {friend} played until [night].",
        "The {friend} was <feeling>.",
    ),
    "night": ("night", "dinner", "the sun went down", "it was time to go home"),
    "sorry": ("Then {he} said sorry to the {friend}.", "But {name} did not care."),
    "storm": ("rain", "snow", "get dark", "thunder"),
    "shelter": (
        "{name} ran home with the {thing} and [cozy].",
        "So {he} hid the {thing} under [cover]. [friends2]",
    ),
    "cozy": ("drank some <drink>", "went to bed", "told {his} <helper> a story", "took a bath"),
    "cover": ("a tree", "{his} coat", "the table", "an umbrella"),
    "friends2": ("It stayed dry.", "{His} {thing} was safe.", "When it ended, {he} was <feeling>."),
}  # fmt: skip

# Comma-separated values, by the value of the variable that they depend on ("": of none).
VALUES: dict[str, dict[str, str]] = {
    "gender": {"": "girl, boy"},
    "name": {
        "girl": "Lily, Mia, Sue, Anna, Lucy, Emma, Jane, Rose, Amy, Ella, Sara, Kim",
        "boy": "Tom, Tim, Ben, Max, Sam, Jack, Leo, Bob, Fred, Noah, Dan, Billy",
    },
    "look": {"": "red, big, blue, shiny, green, yellow, pretty, purple, soft, round"},
    "thing": {"": "ball, doll, kite, car, book, drum, boat, hat, cake, robot, rope, bell"},
    "play": {
        "ball": "kick, throw, roll, bounce, catch",
        "doll": "dress, feed, hug, hold",
        "kite": "fly, pull, lift, chase",
        "car": "race, push, drive, park",
        "book": "read, open, color, carry",
        "drum": "hit, beat, tap, play",
        "boat": "sail, float, row, paint",
        "hat": "wear, toss, share, show",
        "cake": "bake, eat, taste, cut",
        "robot": "build, start, follow, copy",
        "rope": "jump, swing, twist, tie",
        "bell": "ring, shake, polish, hang",
    },
    "place": {"": "park, garden, beach, forest, farm, lake, hill, zoo"},
    "sight": {
        "park": "fountain, slide, swing, statue",
        "garden": "flower, butterfly, snail, bee",
        "beach": "crab, shell, wave, sandcastle",
        "forest": "deer, mushroom, squirrel, cave",
        "farm": "cow, horse, tractor, pig",
        "lake": "swan, fish, bridge, turtle",
        "hill": "rainbow, cloud, goat, tower",
        "zoo": "lion, monkey, zebra, giraffe",
    },
    "giver": {"": "mom, dad, grandma, uncle, aunt"},
    "partner": {"": "sister, brother, cousin, teacher, neighbor"},
    "helper": {"": "mom, dad, grandpa, sister, brother, grandma"},
    "friend": {"": "dog, cat, rabbit, bear, fox, mouse, frog, duck, bird, pony"},
    "feeling": {"": "happy, glad, proud, tired, safe, thankful"},
    "sorrow": {"": "sad, upset, hurt, mad"},
    "spot": {"": "house, fence, window, gate, tree, wall"},
    "spot2": {"": "bed, chair, bush, door, stairs, barn"},
    "hole": {"": "water, mud, well, hole"},
    "seat": {"": "door, fire, river, road"},
    "tool": {"": "stick, cloth, brush, hammer, key, ribbon"},
    "food": {"": "cookie, carrot, sandwich, berry"},
    "drink": {"": "milk, tea, soup, juice"},
}

# Words that agree with a kept value.
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "he": ("gender", {"girl": "she", "boy": "he"}),
    "He": ("gender", {"girl": "She", "boy": "He"}),
    "his": ("gender", {"girl": "her", "boy": "his"}),
    "His": ("gender", {"girl": "Her", "boy": "His"}),
}
