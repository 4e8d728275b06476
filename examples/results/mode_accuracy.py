"""How accurate integration modes are, beside peers, where the kernel must see both ends of a pair at once.

python examples/results/mode_accuracy.py --only particles-32 --models exact-8 low_rank --threads 1
python examples/results/mode_accuracy.py --table

The first command trains what has no log in docs/results/modes yet: restart at will. Several of these may work side by
side if they name different models or, once rates are tuned, different seeds. The second writes the tables of
docs/mode_accuracy.md from the logs. mode_problems.py says what is trained, trials.py by which protocol.
"""

from functools import partial

import trial_tables
from grid import RESULTS, ROOT
from mode_problems import problems
from trial_commands import Study, run_study

LOGS = RESULTS / "modes"
PAGE = ROOT / "docs" / "mode_accuracy.md"

page = partial(trial_tables.page, script="mode_accuracy")


def main() -> None:
    run_study(Study("mode_accuracy", problems, page, LOGS, PAGE), __doc__)


if __name__ == "__main__":
    main()
