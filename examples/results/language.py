"""Bits per byte of causal language models of one size, in equal steps and in equal times, beside counting baselines.

python examples/results/language.py --only gutenberg --models near_far gpt2 --threads 1
python examples/results/language.py --baselines
python examples/results/language.py --timings
python examples/results/language.py --table

The first command trains what has no log in docs/results/language yet: restart at will. Several of these may work side
by side if they name different models or, once rates are tuned, different seeds. The second counts n-grams, in a minute
or two per corpus. The third times steps of models in turns, which says how many are equal in time. The last writes the
tables of docs/language.md from the logs. language_problems.py says what is
trained, trials.py by which protocol. The data: python examples/data/download.py gutenberg wikitext2
"""

from grid import RESULTS, ROOT
from language_problems import problems
from language_tables import page, run_baselines, run_timings
from trial_commands import Study, run_study

LOGS = RESULTS / "language"
PAGE = ROOT / "docs" / "language.md"


def main() -> None:
    run_study(Study("language", problems, page, LOGS, PAGE, run_baselines, run_timings), __doc__)


if __name__ == "__main__":
    main()
