"""A run of train.py, once: where its log is committed it is not repeated."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train

LOGS = Path(__file__).parent / "logs"


def once(name, flags, after=lambda out: {}):
    """The run of these flags in out/NAME, its log in logs/NAME.jsonl, with a last line of what after(folder)
    says of the trained model, or {"diverged": true}. A stopped run goes on at the next call."""
    log, out = LOGS / f"{name}.jsonl", Path("out", name)
    if log.exists():
        return
    sys.argv = ["train.py", *flags, "--out", str(out), *["--resume"] * (out / "ckpt.pt").exists()]
    last = None
    try:
        train.main()
    except SystemExit as e:
        if "not finite" not in str(e):
            raise
        last = {"diverged": True}
    lines = (out / "log.jsonl").read_text()
    if not last and json.loads(lines.splitlines()[-1])["step"] < train.read_checkpoint(out)["args"]["steps"]:
        sys.exit(1)                                         # stopped by a signal
    last = last or after(out)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(lines + (json.dumps(last) + "\n") * bool(last))
