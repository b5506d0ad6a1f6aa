"""SGLang's own way to test retraction: every so many passes it takes back a request as if its cache were full. A fork
has read the variables for that already, so this is run in the server before anything else of it (fork_server.py)."""

from sglang.srt.managers import scheduler

scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 15
