"""
The README's tables are what experiments/report.py makes of the committed logs.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))
import report


def test_the_tables_of_the_readme_are_those_of_the_logs():
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"<!-- (\w+) -->", text)) == set(report.TABLES)
    assert report.filled(text) == text


def test_a_table_between_its_marks_alone_is_replaced():
    first = next(iter(report.TABLES))
    table = report.TABLES[first]()
    around = f"a\n<!-- {first} -->\n%s\n<!-- / -->\nc"
    assert report.filled(around % "b") == around % f"\n{table}\n"


def test_an_interval_is_of_paired_differences():
    """Three values 1, 2, 3: deviation 1, t(2 degrees of freedom) = 4.303 at 95 %."""
    assert abs(report.half([1.0, 2.0, 3.0]) - 4.303 / 3 ** 0.5) < 1e-12
