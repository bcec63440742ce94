from certify.driver import *  # noqa: F403
from certify.driver import Problem, prepare, run  # noqa: F401
