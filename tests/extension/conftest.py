"""The fixture of the tests of extensions."""

import pytest

from tests.extension.packages import Installation


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path)
