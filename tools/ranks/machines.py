#!/usr/bin/env python3
"""Trains the demo's model on two ranks that are on two machines, for which two network namespaces with host names stand.

    tools/ranks/machines.py target/debug/omnigrpo

For Open MPI and for MPICH, it starts the ranks, kills one, cuts the link between the machines, and resumes each time. The finished
run has the bytes of one process. With `--rank_address`, it connects strangers without the secret of the run. Needs root and
`ip`; without them, the exit code is 75.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check import LIMIT_SECS, ROOT, all_ended, done, expect, newest, processes, same, trainer

# Longest time from the loss of a rank to the end of the others.
TO_END_SECS = 30
NAMES = ["omnigrpo-a", "omnigrpo-b"]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
NETWORK = "10.213.77.0/24"
# Device of each machine that leads to the other one.
DEVICE = "wire"
# Address of the first machine to which the second one has no route at first.
FAR = "10.213.78.1"
SKIPPED = 75


def main():
    reason = missing()
    if reason:
        print(f"machines: skipped: {reason}")
        sys.exit(SKIPPED)
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        train = trainer(program, scratch)
        try:
            create(scratch)
            done(train("alone", 4))
            launchers = [("open-mpi", open_mpi(scratch)), ("mpich", mpich(scratch))]
            for name, launcher in launchers:
                started(name, launcher, train, scratch)
                for victim in [1, 0]:
                    killed(f"{name}-killed-{victim}", launcher, train, scratch, victim)
                cut(f"{name}-cut", launcher, train, scratch)
            strangers(launchers[0][1], train, scratch)
        finally:
            remove()
    print("machines: equal bytes on two machines; kills and a cut link lose nothing; strangers are refused")


def missing():
    """Returns the reason why namespaces cannot be created."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [name for name in ["ip", "unshare", "mpirun.openmpi", "mpirun.mpich"] if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} is missing"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def create(scratch):
    """Creates two namespaces and a link between them."""
    remove()
    hosts = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES))
    for name in NAMES:
        ip("netns", "add", name)
        own = Path("/etc/netns") / name
        own.mkdir(parents=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    ip("-n", NAMES[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
        for device in ["lo", DEVICE]:
            ip("-n", name, "link", "set", device, "up")
    ip("-n", NAMES[0], "address", "add", f"{FAR}/32", "dev", "lo")
    # Replaces ssh of a launcher: `agent [options] HOST COMMAND…`.
    agent = scratch / "agent"
    agent.write_text(f'#!/bin/bash\nwhile [[ $1 != omnigrpo-* ]]; do shift; done\n{sys.executable} {__file__} --on "$@"\n')
    # Messages of a rank whose machine the launcher cannot reach. The launcher ends the group of a rank, and `tee` must outlive it.
    rank = scratch / "rank"
    rank.write_text(f'#!/bin/bash\nexec "$@" 2> >(exec setsid tee -a {scratch}/said.$$ >&2)\n')
    for script in [agent, rank]:
        script.chmod(0o755)


def remove():
    for name in NAMES:
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def on(machine, command):
    """Returns a command that runs on a machine."""
    named = f'echo {machine} >/proc/sys/kernel/hostname; exec "$@"'
    return ["ip", "netns", "exec", machine, "unshare", "--uts", "bash", "-c", named, "bash", *map(str, command)]


def open_mpi(scratch):
    options = {"plm_rsh_agent": scratch / "agent", "oob_tcp_if_include": NETWORK, "btl_tcp_if_include": NETWORK}
    words = [str(word) for name, value in options.items() for word in ["--mca", name, value]]
    return ["mpirun.openmpi", *words, "--bind-to", "none", "-n", "2", "--host", ",".join(NAMES), scratch / "rank"]


def mpich(scratch):
    return [
        "mpirun.mpich", "-launcher", "ssh", "-launcher-exec", scratch / "agent", "-iface", DEVICE, "-n", "2", "-hosts", ",".join(NAMES),
        scratch / "rank",
    ]  # fmt: skip


def started(name, launcher, train, scratch):
    """Starts ranks on both machines."""
    said = done(on(NAMES[0], [*launcher, *train(name, 2)]))
    expect("a step takes 4 prompts of 4 completions, on 2 ranks" in said, said)
    same(scratch / "alone", scratch / name)


def begin(name, launcher, train, scratch):
    """Starts a long run and waits for its first checkpoint. Returns its launcher and its ranks in order."""
    for file in scratch.glob("said.*"):
        file.unlink()
    out = scratch / name
    command = on(NAMES[0], [*launcher, *train(name, 2, steps=1000)])
    with open(out.with_suffix(".txt"), "w") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **ROOT}, start_new_session=True)
    until = time.monotonic() + LIMIT_SECS
    while not (out / "checkpoint-1").exists():
        expect(run.poll() is None and time.monotonic() < until, out.with_suffix(".txt").read_text())
        time.sleep(0.05)
    ranks = sorted(processes(str(out)), key=machine_of)
    expect([machine_of(rank) for rank in ranks] == NAMES, f"the ranks {ranks} are not on {NAMES}")
    return run, ranks


def machine_of(process):
    """Returns the machine that a process runs on."""
    return subprocess.run(["ip", "netns", "identify", str(process)], capture_output=True, text=True, check=True).stdout.strip()


def end(run, out, scratch, victims, may_be_silent=False):
    """Waits until all ranks have ended, and checks that each survivor names the one that is lost. Returns false if one says nothing."""
    begun = time.monotonic()
    all_ended(out, TO_END_SECS)
    print(f"machines: {out.name}: all ranks have ended after {time.monotonic() - begun:.1f} s", flush=True)
    for survivor, victim in victims:
        said = (scratch / f"said.{survivor}").read_text()
        if may_be_silent and not said:
            print(f"machines: {out.name}: the launcher has ended the survivor before it could speak; again", flush=True)
            run.wait(TO_END_SECS)
            return False
        expect(f"the run has ended: rank {victim} (process " in said, f"{out.name}, process {survivor}: {said}")
    # A launcher that has lost a machine waits for it.
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
    run.wait(TO_END_SECS)
    return True


def resumed(name, launcher, train, scratch):
    """Checks the newest checkpoint, and repeats the command with one more step."""
    step = newest(scratch / name)
    sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=scratch / name / f"checkpoint-{step}")
    expect(sums.returncode == 0, f"checkpoint-{step} of {name} is damaged")
    said = done(on(NAMES[0], [*launcher, *train(name, 2, steps=step + 1)]))
    expect(f"at step {step} of {step + 1}" in said, said)


def killed(name, launcher, train, scratch, victim):
    """Kills a rank."""
    # A launcher also ends the other ranks, perhaps before they can speak: MPICH at once, Open MPI seldom so early.
    speaks = launcher[0] == "mpirun.openmpi"
    for left in (2, 1, 0):
        run, ranks = begin(name, launcher, train, scratch)
        os.kill(ranks[victim], signal.SIGKILL)
        if end(run, scratch / name, scratch, [(ranks[1 - victim], victim)] if speaks else [], may_be_silent=left > 0):
            break
        shutil.rmtree(scratch / name)
    resumed(name, launcher, train, scratch)


def cut(name, launcher, train, scratch):
    """Cuts the link between the machines, and restores it after the run has ended."""
    run, ranks = begin(name, launcher, train, scratch)
    ip("-n", NAMES[1], "link", "set", DEVICE, "down")
    end(run, scratch / name, scratch, [(ranks[0], 1), (ranks[1], 0)])
    # Processes that the launcher has left on the second machine.
    left = subprocess.run(["ip", "netns", "pids", NAMES[1]], capture_output=True, text=True, check=True)
    for process in left.stdout.split():
        os.kill(int(process), signal.SIGKILL)
    ip("-n", NAMES[1], "link", "set", DEVICE, "up")
    resumed(name, launcher, train, scratch)


def strangers(launcher, train, scratch):
    """Connects strangers to the first rank, which waits for the second one because that has no route to its address."""
    name = "strangers"
    command = [str(word) for word in on(NAMES[0], [*launcher, *train(name, 2), "--rank_address", FAR])]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ROOT})
    port, until = None, time.monotonic() + LIMIT_SECS
    while not port:
        expect(run.poll() is None and time.monotonic() < until, "the first rank has opened no port")
        time.sleep(0.05)
        port = next(filter(None, map(open_port, processes(str(scratch / name)))), None)
    done(["ip", "netns", "exec", NAMES[0], sys.executable, __file__, "--stranger", port])
    ip("-n", NAMES[1], "route", "add", f"{FAR}/32", "via", ADDRESSES[0])
    said = run.communicate(timeout=LIMIT_SECS)[0]
    expect(run.returncode == 0, said)
    same(scratch / "alone", scratch / name)
    wrong = [str(word) for word in on(NAMES[0], [*launcher, *train("wrong", 2), "--rank_address", "192.0.2.1"])]
    refused = subprocess.run(wrong, capture_output=True, text=True, env={**os.environ, **ROOT}, timeout=LIMIT_SECS)
    expect(refused.returncode != 0 and "192.0.2.1: Cannot assign requested address" in refused.stderr, refused.stderr)
    print("machines: strangers are refused, and a rank that connects late is not", flush=True)


def open_port(process):
    """Returns the port that a process has opened at the far address."""
    try:
        lines = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return None
    own = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    address = int.from_bytes(socket.inet_aton(FAR), "little")
    return next((int(port, 16) for at, port in own if int(at, 16) == address), None)


def stranger(port):
    """Connects to the first rank without the secret of the run, and expects the end of the connection without an answer."""
    for says in [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(24), os.urandom(16) + (1).to_bytes(8, "little")]:
        with socket.create_connection((FAR, port), timeout=10) as connection:
            connection.sendall(says)
            try:
                answer = connection.recv(1)
            except ConnectionResetError:
                answer = b""
            expect(not answer, f"{says} was answered with {answer}")


if __name__ == "__main__":
    if sys.argv[1] == "--on":
        os.execvp("ip", on(sys.argv[2], ["bash", "-c", " ".join(sys.argv[3:])]))
    if sys.argv[1] == "--stranger":
        stranger(int(sys.argv[2]))
    else:
        main()
