"""Commands print to a console of one known width, and Ctrl-C reaches them, whatever the shell that runs the tests."""

import os
import signal

os.environ["COLUMNS"] = "160"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background jobs, and what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
