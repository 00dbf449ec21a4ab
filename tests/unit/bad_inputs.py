# ruff: noqa: E501 - expected lines stand here whole, as a user sees them
"""Bad job specs and policies, and the one line that a person gets for each.

``{file}`` in a line is the path the input was written to. The table is data, so that tests of the
command line and of the workflow's input can use it too.
"""

from __future__ import annotations

from dataclasses import dataclass

SPEC_KEYS = "accepted here: checkpoint, code, command, env, labels, layout, machines, name, policy, progress, ranks_per_machine, working_dir"
SECTIONS = "accepted here: detection, ladder, machines, notify, probes, retention, teardown"
JOB_SECTIONS = "detection, ladder, machines, teardown"


@dataclass(frozen=True, slots=True)
class BadInput:
    """One bad file."""

    name: str
    content: str | bytes
    line: str
    """The only line of the error."""


def _job(name: str, extra: str, line: str) -> BadInput:
    """A good job with something bad added (from line 3 on)."""
    return BadInput(name, f"name: job\ncommand: python train.py\n{extra}", line)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(6)
)

BAD_SPECS: tuple[BadInput, ...] = (
    BadInput("empty file", "", "{file}: got an empty file; a job spec needs at least `name` and `command`"),
    BadInput("only comments", "# later\n", "{file}: got an empty file; a job spec needs at least `name` and `command`"),
    BadInput("a list", "- python\n- train.py\n", "{file}:1: got a list of 2; a mapping is needed: a job spec needs at least `name` and `command`"),
    BadInput("a word", "train\n", "{file}:1: got 'train'; a mapping is needed: a job spec needs at least `name` and `command`"),
    BadInput("binary", b"\x80\x81\xff\xfe", "{file}: got bytes that are not UTF-8 text; a YAML or JSON file is needed"),
    BadInput("a control character", "name: job\ncommand: a\x00b\n", "{file}: got the character 0x00; text without control characters"),
    BadInput("too large", "# " + "x" * (256 * 1024), "{file}: got a file that is too large; at most 256 KiB"),
    BadInput("a tab", "name: job\ncommand: x\nlayout:\n\ttp: 2\n", "{file}:4: got a tab; indent with spaces"),
    BadInput("a duplicate key", "name: job\ncommand: x\nname: other\n", "{file}:3: name: got a key that stands there twice; give each key once"),
    BadInput("a duplicate key in JSON", '{"name": "job",\n "name": "other", "command": "x"}', "{file}:2: name: got a key that stands there twice; give each key once"),
    BadInput("an alias bomb", BOMB, "{file}:5: e: got aliases that expand too far; the values written out"),
    BadInput("an endless alias", "name: &a [*a]\n", "{file}:1: got an alias (*a) inside of itself; the value written out"),
    BadInput("an alias without an anchor", "name: *a\n", "{file}:1: got an alias that names no anchor (a); the value written out"),
    BadInput("deep nesting", "name: " + "[" * 100, "{file}:1: got more than 32 levels of nesting; a flatter file"),
    BadInput("a tag", "name: !!python/object:os.system x\ncommand: x\n", "{file}:1: name: got a YAML tag (!...); plain values only"),
    BadInput("two documents", "name: job\ncommand: x\n---\nname: job\n", "{file}:4: got a second document (---); one document in a file"),
    BadInput("a colon in a text", "name: job\ncommand: echo a: b\n", "{file}:2: got a second `:` in one line; quote text that contains `: `, or start a new line"),
    BadInput("an open bracket", "name: job\ncommand: [python, train.py\n", "{file}:3: got text that is not YAML; expected ',' or ']', but got '<stream end>'"),
    BadInput("a number as a key", "name: job\ncommand: x\n5: y\n", "{file}:3: got the key 5; a key must be text: quote it"),
    BadInput("no command", "name: job\n", "{file}:1: command: got nothing; this key is required"),
    BadInput("a bad name", "name: My Job\ncommand: x\n", "{file}:1: name: got 'My Job'; 1 to 62 lower-case letters, digits and -, with a letter or digit at both ends"),
    BadInput("a name that is a date", "name: 2026-01-01\ncommand: x\n", "{file}:1: name: got the date 2026-01-01; text is needed: quote it"),
    BadInput("an empty command", "name: job\ncommand: []\n", "{file}:2: command: got an empty list; at least 1 is needed"),
    BadInput("a number in the command", "name: job\ncommand: [python, train.py, 5]\n", "{file}:2: command[2]: got 5; text is needed (a number or true/false must stand in quotes)"),
    BadInput("an open quote in the command", "name: job\ncommand: python -c 'x\n", "{file}:2: command: got \"python -c 'x\"; cannot be split like a shell would: No closing quotation"),
    _job("a misspelt key", "machine: 2\n", f"{{file}}:3: machine: got a key that is not known; did you mean machines? {SPEC_KEYS}"),
    _job("a secret under an unknown key", "wandb: sk-12345\n", f"{{file}}:3: wandb: got a key that is not known; {SPEC_KEYS}"),
    _job("no machines", "machines: 0\n", "{file}:3: machines: got 0; it must be 1 or more"),
    _job("machines in words", "machines: two\n", "{file}:3: machines: got 'two'; a whole number is needed"),
    _job("half a machine", "machines: 1.5\n", "{file}:3: machines: got 1.5; a whole number is needed"),
    _job("a number in env", "env:\n  TOKEN: 12345\n", "{file}:4: env.TOKEN: got a value that is not shown; text is needed (a number or true/false must stand in quotes)"),
    _job("a reserved variable", "env: {RANK: '0'}\n", "{file}:3: env: got a mapping; RANK is set by Everstep for every run and cannot be overridden"),
    _job("a relative directory", "working_dir: run\n", "{file}:3: working_dir: got 'run'; must be an absolute path"),
    _job("a layout that does not fit", "layout: {tp: 3}\nmachines: 2\n", "{file}:3: layout: got sizes that do not fit; tp*cp*ep*dp*pp = 3*1*1*1*1 = 3, but machines*ranks_per_machine = 2"),
    _job("a pattern that is none", "progress: {pattern: 'step (?P<step>'}\n", "{file}:3: progress.pattern: got 'step (?P<step>'; a regular expression is needed: missing ), unterminated subpattern at position 5"),
    _job("a pattern without a step", "progress:\n  pattern: 'it (\\d+)'\n", "{file}:4: progress.pattern: got 'it (\\\\d+)'; must have a group named step: (?P<step>\\d+)"),
    _job("a pattern with another group", "progress: {pattern: '(?P<step>.)(?P<los>.)'}\n", "{file}:3: progress.pattern: got '(?P<step>.)(?P<los>.)'; groups may be named step, loss and grad_norm, not los"),
    _job("an order without an axis", "layout:\n  order: [tp, dp]\n", "{file}:4: layout.order: got a list of 2; order must name each of tp, cp, ep, dp, pp exactly once"),
    _job("an unknown axis", "layout: {zp: 2}\n", "{file}:3: layout.zp: got a key that is not known; accepted here: cp, dp, ep, order, pp, tp"),
    _job("a relative checkpoint directory", "checkpoint: {dir: ckpt}\n", "{file}:3: checkpoint.dir: got 'ckpt'; must be an absolute path that every machine of the job can reach"),
    _job("a bad override", "policy:\n  ladder:\n    stable_after: 5\n", "{file}:5: policy.ladder.stable_after: got 5; a duration needs a unit: write 5s, 5m or 5h"),
    _job("an unknown override", "policy:\n  detect: {}\n", f"{{file}}:4: policy.detect: got a key that is not known; did you mean detection? accepted here: {JOB_SECTIONS}"),
    _job("the fleet's registrations", "policy:\n  machines:\n    register_interval: 1h\n", "{file}:5: policy.machines.register_interval: got '1h'; register_interval is the fleet's (an agent registers once for all jobs): set it in config/policy.yaml; a job may override command_timeout, command_validity, wait_poll_interval"),
    _job("the fleet's heartbeats", "policy:\n  detection: {heartbeat_interval: 500ms}\n", "{file}:4: policy.detection.heartbeat_interval: got '500ms'; heartbeat_interval is the fleet's (an agent has one rhythm for all jobs): set it in config/policy.yaml; a job may override blind_job_after, exit_skew_max, first_step_max, hang_factor, hang_min, log_hang_min, log_silent_after, loss_spike_factor, loss_spike_sustained, loss_spike_warmup, loss_spike_window, machine_lost_after, progress_report_interval, rdma_silent_after, section_max, settle_window, slow_round_interval, slow_rounds, step_time_factor, step_time_window, watch_lost_after"),
    _job("the fleet's ledger", "policy:\n  retention:\n    observations: 24h\n", f"{{file}}:5: policy.retention.observations: got '24h'; retention is the fleet's (disks and ledger are shared by all jobs): set it in config/policy.yaml; a job may override {JOB_SECTIONS}"),
    _job("the fleet's webhook", "policy: {notify: {webhook_url_env: MY_HOOK}}\n", f"{{file}}:3: policy.notify.webhook_url_env: got a value that is not shown; notify is the fleet's (controllers have one webhook for all jobs): set it in config/policy.yaml; a job may override {JOB_SECTIONS}"),
    _job("a misspelt key of the fleet's", "policy: {notify: {url: 'https://hooks.example/T0/key'}}\n", f"{{file}}:3: policy.notify.url: got a key that is not known; notify is the fleet's (controllers have one webhook for all jobs): set it in config/policy.yaml; a job may override {JOB_SECTIONS}"),
    _job("a section of the fleet's without keys", "policy:\n  retention: 20\n", f"{{file}}:4: policy.retention: got 20; retention is the fleet's (disks and ledger are shared by all jobs): set it in config/policy.yaml; a job may override {JOB_SECTIONS}"),
    BadInput("a torchrun range", "name: job\ncommand: torchrun --nnodes 1:4 t.py\n", "{file}:2: command: got --nnodes 1:4; one number, like --nnodes 2: a job runs on a fixed number of machines, and those that fail are replaced"),
    BadInput("two numbers of machines", "name: job\ncommand: torchrun --nnodes 4 t.py\nmachines: 2\n", "{file}:2: command: got --nnodes 4 in the command, and machines: 2; give the number once, or twice the same (the command means machines: 4)"),
    BadInput("a wrapped torchrun", "name: job\ncommand: [bash, -c, torchrun t.py]\n", "{file}:2: command: got torchrun inside 'bash'; it would start a launcher for every rank: write the torchrun command itself as `command` (variables under `env`)"),
)  # fmt: skip

BAD_POLICIES: tuple[BadInput, ...] = (
    BadInput("empty file", "", "{file}: got an empty file; keys like `detection:` and `ladder:` are needed"),
    BadInput("a misspelt section", "detektion:\n  hang_min: 5m\n", f"{{file}}:1: detektion: got a key that is not known; did you mean detection? {SECTIONS}"),
    BadInput("a misspelt key", "detection:\n  # long steps\n  hang_minimum: 5m\n", "{file}:3: detection.hang_minimum: got a key that is not known; did you mean hang_min? accepted here: blind_job_after, exit_skew_max, first_step_max, hang_factor, hang_min, heartbeat_interval, log_hang_min, log_silent_after, loss_spike_factor, loss_spike_sustained, loss_spike_warmup, loss_spike_window, machine_lost_after, progress_report_interval, ..."),
    BadInput("a key without its section", "hang_min: 5m\n", f"{{file}}:1: hang_min: got a key that is not known; {SECTIONS}"),
    BadInput("a section without keys", "ladder:\n", "{file}:1: ladder: got nothing; a section with keys is needed"),
    BadInput("a time without a unit", "detection:\n  hang_min: 60\n", "{file}:2: detection.hang_min: got 60; a duration needs a unit: write 60s, 60m or 60h"),
    BadInput("a time in words", "detection: {hang_min: a minute}\n", "{file}:1: detection.hang_min: got 'a minute'; a duration is written like 500ms, 30s, 5m or 1h30m"),
    BadInput("a negative time", "detection: {hang_min: -5s}\n", "{file}:1: detection.hang_min: got '-5s'; a duration cannot be negative"),
    BadInput("an interval of nothing", "detection: {heartbeat_interval: 0s}\n", "{file}:1: detection.heartbeat_interval: got '0s'; it must be 1ms or more"),
    BadInput("a time without end", "detection: {hang_min: 99999h}\n", "{file}:1: detection.hang_min: got '99999h'; it must be 8760h (a year) or less"),
    BadInput("a wait that agents refuse", "teardown: {kill_wait: 25h}\n", "{file}:1: teardown.kill_wait: got '25h'; it must be 24h or less: agents wait no longer"),
    BadInput("a stream that is always broken", "detection: {heartbeat_interval: 1m}\n", "{file}:1: detection.heartbeat_interval: got '1m'; it must be 5s or less: a stream that is silent for 7s counts as broken"),
    BadInput("a watch that is always lost", "detection: {watch_lost_after: 300ms}\n", "{file}:1: detection.watch_lost_after: got '300ms'; it must be 1s or more: a watch heartbeats every 400ms"),
    BadInput("an answer waited for too long", "machines: {command_timeout: 5m}\n", "{file}:1: machines.command_timeout: got '5m'; it must be 1m or less: a start is tried three times within ten minutes"),
    BadInput("a budget below zero", "ladder: {user_code_restarts_max: -1}\n", "{file}:1: ladder.user_code_restarts_max: got -1; it must be 0 or more"),
    BadInput("a word for a switch", "ladder: {user_code_gives_up: perhaps}\n", "{file}:1: ladder.user_code_gives_up: got 'perhaps'; true or false is needed"),
    BadInput("a factor that is too small", "detection: {hang_factor: 1}\n", "{file}:1: detection.hang_factor: got 1; it must be 2.0 or more"),
    BadInput("a secret where its name belongs", "notify: {webhook_url_env: 'https://hooks.example/T0/secret'}\n", "{file}:1: notify.webhook_url_env: got a value that is not shown; the name of an environment variable (never the URL itself), or ''"),
    BadInput("no runs kept", "retention: {runs_on_machine_max: 0}\n", "{file}:1: retention.runs_on_machine_max: got 0; it must be 1 or more"),
)  # fmt: skip
