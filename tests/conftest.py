"""Commands print to a console of one known width, whatever the terminal that runs the tests."""

import os

os.environ["COLUMNS"] = "160"
