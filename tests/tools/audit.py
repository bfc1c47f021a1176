"""Look for known vulnerabilities in the releases of the locks with hashes: `python -m tests.tools.audit`.

pip-audit looks each release up at PyPI, and at OSV if PyPI has no answer. Behind a mirror there may be
neither: pip-audit then finds nothing, or fails. This is not taken for a clean result: the pinned releases
are listed instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOCKS = sorted((Path(__file__).parents[2] / ".ci/hashes").glob("*.txt"))
SERVICES = ("pypi", "osv")


def main() -> int:
    """Return 1 if a release has a known vulnerability, else 0."""
    return max(map(audit, LOCKS))


def audit(lock: Path) -> int:
    """Print what is known of the releases of one lock; return 1 if one is vulnerable."""
    for service in SERVICES:
        found = ask(lock, service)
        audited = [each for each in found if "vulns" in each]
        if not audited:
            continue
        for each in found:
            for known in each.get("vulns", ()):
                fixed = ", ".join(known["fix_versions"]) or "no release"
                print(f"{each['name']} {each['version']}: {known['id']}, fixed in {fixed}")
        print(f"{lock.name}: {len(audited)} of {len(found)} releases are known to {service}")
        return int(any(each["vulns"] for each in audited))
    print(f"{lock.name}: no data on vulnerabilities could be had; these releases are pinned:")
    print(*pinned(lock), sep="\n")
    return 0


def ask(lock: Path, service: str) -> Sequence[dict[str, object]]:
    """Return pip-audit's record of each release; empty if it could not ask."""
    options = ("--disable-pip", "--require-hashes", "--progress-spinner", "off", "--timeout", "20")
    command = (sys.executable, "-m", "pip_audit", "-s", service, "-f", "json", "-r", str(lock))
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    return json.loads(done.stdout)["dependencies"] if done.stdout.strip() else ()


def pinned(lock: Path) -> list[str]:
    """Return the releases of a lock: `click 8.5.1`."""
    return [" ".join(each) for each in re.findall(r"^(\S+)==(\S+)", lock.read_text(), re.MULTILINE)]


if __name__ == "__main__":
    sys.exit(main())
