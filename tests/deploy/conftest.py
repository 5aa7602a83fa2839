from tests.planning.conftest import config as config
