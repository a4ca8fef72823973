from tests.data.conftest import hub as hub
