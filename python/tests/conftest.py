"""Golden cases, and what several tests need."""

from __future__ import annotations

import pytest
from helpers import Case, folder, read


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        found = folder()
        cases: list[Case] = [] if found is None else read(found)
        if found is not None:
            assert len(cases) >= 100, f"{found} has {len(cases)} cases only"
        metafunc.parametrize("golden", cases, ids=[case.name for case in cases])
