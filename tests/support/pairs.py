"""Few combinations of settings in which every two values of different settings come together (pairwise testing)."""

import itertools
import random

#: Random combinations that are compared for each one that is taken.
TRIED = 60


def pairs_of(settings):
    """The combinations, as dicts of values by name, each with the most new pairs of those that were tried."""
    rng, sizes = random.Random(0), {name: len(values) for name, values in settings.items()}
    numbered = {name: [(name, number) for number in range(size)] for name, size in sizes.items()}
    left = {pair for two in itertools.combinations(numbered.values(), 2) for pair in itertools.product(*two)}

    def pairs(chosen):
        return left.intersection(itertools.combinations(chosen.items(), 2))

    while left:
        certain = dict(min(left))
        tried = ({name: rng.randrange(size) for name, size in sizes.items()} | certain for _ in range(TRIED))
        best = max(tried, key=lambda chosen: len(pairs(chosen)))
        left -= pairs(best)
        yield {name: settings[name][number] for name, number in best.items()}
