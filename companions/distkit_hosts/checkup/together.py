"""What several machines can do together, and what is wrong between them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from distkit.views.scene.units import human_bytes, human_seconds, joined
from distkit_hosts.checkup.alone import NEEDED
from distkit_hosts.checkup.check import Check, failure, fine, named, on, warning
from distkit_hosts.checkup.facts import HERE, Facts, Json
from distkit_hosts.checkup.ways import ways

#: Clocks further apart than this are told [s].
APART = 0.1

#: A link is slow if it carries less than this; or less than a gigabit, and others so many times as
#: much [bytes/s]. Faster ones differ by how busy their machines are.
SLOW, GIGABIT, SLOWER = 20e6, 125e6, 3.0

#: Messages between machines of one room do not take longer [s].
FAR = 5e-3

#: Gradients of so many bytes make the consequence of a slow link plain.
GRADIENTS = 100e6


def judge(facts: Facts) -> Iterator[Check]:
    """Every check of what is between machines."""
    yield from _lost(facts)
    if facts.hosts:
        for check in (_names, _same, ways, _interfaces, _versions, _shared, _clocks, _links):
            yield from check(facts)


# -- ssh -------------------------------------------------------------------------------------------

#: What ssh says -> (what it means, the remedy). The first that fits counts.
_SSH = {
    "permission denied": (
        "ssh.password",
        "ssh does not enter {host} without a password",
        "Let it in by a key: ssh-keygen, then ssh-copy-id {target}.",
    ),
    "host key verification failed": (
        "ssh.key",
        "ssh does not know the key of {host}, or knows another one",
        "Look at it once by hand, and accept it: ssh {target}. After a new installation, "
        "ssh-keygen -R {door} first.",
    ),
    "could not resolve hostname": (
        "names.unknown",
        "the name {door} is not known here",
        "Write it to /etc/hosts or ~/.ssh/config here, or use an address.",
    ),
    "connection refused": (
        "ssh.refused",
        "nothing listens on port {port} of {host}",
        "Start sshd there, or name its port in ~/.ssh/config.",
    ),
    "no route to host": (
        "ssh.silent",
        "{host} does not answer",
        "Look whether it is on and its cable in; then at the route: ip -4 route get {door}.",
    ),
    "timed out": (
        "ssh.silent",
        "{host} does not answer",
        "Look whether it is on, then at firewalls between here and there.",
    ),
    "no answer": (
        "ssh.silent",
        "{host} does not answer",
        "Look whether it is on, and how busy it is.",
    ),
    "no python": (
        "python.missing",
        "there is no Python on {host}",
        "Install the environment of this machine there, or name its Python with --python.",
    ),
    "is too old": (
        "python.old",
        "the Python of {host} is too old",
        "Install the environment of this machine there, or name its Python with --python.",
    ),
    "": (
        "ssh.other",
        "no program can be started on {host}",
        "Try it by hand: ssh {target} python3 --version.",
    ),
}


def _lost(facts: Facts) -> Iterator[Check]:
    for host, about in facts.lost.items():
        kind, what, remedy = _why(facts, host, about)
        known = {"host": host, **facts.targets.get(host, {})}
        what = f"{what.format(**known)} ({about['words']})."
        yield failure(kind, what, remedy.format(**known), host)
    fit = [host for host in facts.hosts if host not in facts.lost]
    if fit:
        yield fine("ssh", f"ssh without a password: {joined(fit)}", *fit)


def _why(facts: Facts, host: str, about: Json) -> tuple[str, str, str]:
    """Why a host is lost: the kind, what happened, and the remedy."""
    said = about["words"].lower()
    kind, what, remedy = next(reason for words, reason in _SSH.items() if words in said)
    seen = [other for other in facts.knocked.get(host, ()) if other != HERE]
    if about["stage"]:
        return "ssh.cut", f"{{host}} fell silent when asked about {about['stage']}", remedy
    if kind != "ssh.silent":
        return kind, what, remedy
    if HERE in facts.knocked.get(host, ()):
        return (
            "ssh.hangs",
            "{host} takes connections, and then does not answer",
            "Look how busy it is; and whether large frames are lost on the way, which ssh needs "
            "for its keys: ping -M do -s 1400 {door}. If so: ip link set IFACE mtu 1280 there.",
        )
    if seen:
        reach = "reach" if len(seen) > 1 else "reaches"
        remedy = "The link between it and here is cut, or a firewall is between them."
        return kind, f"{what}, though {joined(seen)} {reach} it", remedy
    return kind, what, remedy


# -- names -----------------------------------------------------------------------------------------


def _names(facts: Facts) -> Iterator[Check]:
    found = [
        check
        for asked, known in facts.names.items()
        for host, answer in known.items()
        if host in facts.machines and not _is_address(_called(facts, asked, host))
        for check in _name(facts, asked, host, answer)
    ]
    yield from _merged(found)
    if not any(check.kind != "names.back" for check in found):
        yield fine("names", "every machine knows the names of the others")


def _name(facts: Facts, asked: str, host: str, answer: Json) -> Iterator[Check]:
    """What is wrong with a host's name, as a machine knows it."""
    name, right = _called(facts, asked, host), facts.addresses.get(host, "")
    where = f"{asked}'s /etc/hosts" if asked != HERE else "/etc/hosts here"
    line = f"{right or 'ADDRESS'} {name}"
    level = warning if host == HERE else failure  # nobody has to know a notebook's machine
    if answer.get("silent"):
        remedy = f"Repair the name server in /etc/resolv.conf {on(asked)}."
        what = f"the name server {on(asked)} does not answer for {name!r} ({answer['error']})."
        yield level("names.silent", what, remedy, asked, host)
    elif "ipv6" in answer:
        what = f"{name!r} has only IPv6 addresses {on(asked)} ({joined(answer['ipv6'])})."
        remedy = f"Ranks connect by IPv4: add the line {line!r} to {where}, or an A record."
        yield level("names.ipv6", what, remedy, asked, host)
    elif "error" in answer:
        what = f"{name!r} does not resolve {on(asked)} ({answer['error']})."
        yield level("names.unknown", what, f"Add the line {line!r} to {where}.", asked, host)
    else:
        yield from _addresses(facts, asked, host, answer)


def _addresses(facts: Facts, asked: str, host: str, answer: Json) -> Iterator[Check]:
    name, right = _called(facts, asked, host), facts.addresses.get(host, "")
    first, where = answer["addresses"][0], "/etc/hosts " + on(asked)
    if asked == host and not first.startswith("127."):
        return
    if first.startswith("127.") and not right.startswith("127."):
        whose = "its own name" if asked == host else f"{name!r}"
        yield (warning if asked == HERE == host else failure)(
            "names.loopback",
            f"{named(asked)} resolves {whose} to {first}: ranks there would listen on "
            "loopback, where no other machine reaches them.",
            f"Remove that line from {where}, or change it to '{right or 'ADDRESS'} {name}'.",
            asked,
            host,
        )
    elif first not in _own(facts, host) and right:
        yield failure(
            "names.wrong",
            f"{named(asked)} resolves {name!r} to {first}, which is no address of {host}: that "
            f"is {right}.",
            f"Correct it in {where}, or in the name server.",
            asked,
            host,
        )
    elif not answer["back"]:
        what = f"{first} ({name}) has no name {on(asked)}: logs show the address."
        yield warning("names.back", what, f"Add it to {where}.", asked, host)


def _called(facts: Facts, asked: str, host: str) -> str:
    """A host's name, as a machine calls it: here ssh may have another one."""
    return str(facts.targets[host]["door" if asked == HERE else "name"])


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdigit()


def _own(facts: Facts, host: str) -> set[str]:
    return {i["address"] for i in facts.machines.get(host, {}).get("interfaces", {}).values()}


def _merged(checks: list[Check]) -> Iterator[Check]:
    """The same complaint of many machines about one, or of one about many, told once."""
    about: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        about[check.kind, check.hosts[-1]].append(check)
    for (kind, host), same in about.items():
        first, *others = same
        if not others:
            yield first
            continue
        who = named(*(check.hosts[0] for check in others))
        message = f"{first.message} The same is true of {who}."
        hosts = [check.hosts[0] for check in same]
        yield Check(kind, first.level, message, first.remedy, (*hosts, host))


def _same(facts: Facts) -> Iterator[Check]:
    hosts = facts.hosts
    for i, a in enumerate(hosts):
        for b in hosts[i + 1 :]:
            if facts.addresses.get(a) == facts.addresses.get(b):
                what = f"{a} and {b} are the same machine ({facts.addresses.get(a)})."
                yield warning("hosts.same", what, "Name it once.", a, b)


# -- what they have --------------------------------------------------------------------------------


def _interfaces(facts: Facts) -> Iterator[Check]:
    by: dict[str, set[str]] = defaultdict(set)
    for a, b in facts.ordered():
        name = facts.way(a, b).get("interface")
        if name and name != "lo" and HERE not in (a, b):
            by[a].add(name)
    for host, names in by.items():
        if len(names) > 1:
            yield warning(
                "interfaces.several",
                f"{host} reaches the others by several interfaces ({joined(sorted(names))}), and "
                "gloo takes one for all.",
                "Name hosts by addresses of one network, or set GLOO_SOCKET_IFNAME to the one "
                "that all hosts share.",
                host,
            )
    one = {host: min(names) for host, names in by.items() if len(names) == 1}
    if one:
        text = ", ".join(f"{host} {name}" for host, name in one.items())
        yield fine("interfaces", f"interface to the others (GLOO_SOCKET_IFNAME): {text}", *one)


def _versions(facts: Facts) -> Iterator[Check]:
    ours = facts.machines[HERE]
    for host in facts.hosts:
        yield from _differences(host, ours, facts.machines[host])
    versions = [{name: m["packages"][name] for name in NEEDED} for m in facts.machines.values()]
    pythons = {m["python"]["version"] for m in facts.machines.values()}
    if len(pythons) == 1 and all(v == versions[0] and all(v.values()) for v in versions):
        same = ", ".join(f"{name} {version}" for name, version in versions[0].items())
        yield fine("versions", f"the same everywhere: Python {min(pythons)}, {same}")


def _differences(host: str, ours: Json, theirs: Json) -> Iterator[Check]:
    here, there = ours["python"]["version"], theirs["python"]["version"]
    path = theirs["python"]["executable"]
    if here != there:
        what = f"{host} has Python {there} ({path}), this machine {here}"
        remedy = f"Install Python {here} there, or name it with --python."
        if here.split(".")[:2] == there.split(".")[:2]:
            yield warning("python.differs", f"{what}.", remedy, host)
        else:
            what += ": functions do not travel between Pythons of different minor versions."
            yield failure("python.differs", what, remedy, host)
    for name in ("torch", "ipyparallel"):
        a, b = ours["packages"][name], theirs["packages"][name]
        if a and b and a != b:
            yield _other(host, name, a, b, path)
    a, b = ours["distkit"], theirs["distkit"]
    if a and b and a != b:
        version = theirs["packages"]["distkit"]
        what = f"distkit on {host} is not the same as here (version {version}, other files)."
        remedy = "Install the same there, or share its folder."
        yield failure("distkit.differs", what, remedy, host)


def _other(host: str, name: str, ours: str, theirs: str, path: str) -> Check:
    """Two versions: another release is a failure, another build of it a surprise."""
    same = ours.split("+")[0] == theirs.split("+")[0]
    what = f"{host} has {name} {theirs}, this machine {ours}."
    remedy = f"Run there: {path} -m pip install {name}=={ours.split('+')[0]}"
    return (warning if same else failure)(f"{name}.differs", what, remedy, host)


def _shared(facts: Facts) -> Iterator[Check]:
    for kind, about in facts.shared.items():
        path, seen = about["path"], about["seen"]
        without = [host for host in facts.hosts if not seen.get(host)]
        what = "home" if kind == "home" else "this folder"
        if not without:
            yield fine(f"{kind}.shared", f"{what} ({path}) is shared by all machines")
            continue
        does = "does" if len(without) == 1 else "do"
        yield warning(
            f"{kind}.own",
            f"{joined(without)} {does} not share {path} ({what}) with this machine: modules, data "
            "and checkpoints there are not found.",
            "Share it (NFS), copy what ranks need, or keep functions in the notebook, which "
            "sends them.",
            *without,
        )


def _clocks(facts: Facts) -> Iterator[Check]:
    wrong = {host: c for host, c in facts.clocks.items() if abs(c[0]) > APART + c[1]}
    for host, (offset, error) in wrong.items():
        word = "ahead of" if offset > 0 else "behind"
        yield warning(
            "clock",
            f"the clock of {host} is {human_seconds(abs(offset))} (± {human_seconds(error)}) "
            f"{word} this one: times in logs and files of the two do not compare.",
            "Set it by NTP there: timedatectl set-ntp true.",
            host,
        )
    if facts.clocks and not wrong:
        worst = max(abs(offset) + error for offset, error in facts.clocks.values())
        yield fine("clock", f"clocks agree within {human_seconds(worst)}")


# -- how fast --------------------------------------------------------------------------------------


def _links(facts: Facts) -> Iterator[Check]:
    links = facts.links()
    if not links:
        return
    usual = median(beta for _, beta in links.values())
    limit = min(1 / SLOW, max(1 / GIGABIT, SLOWER * usual))
    slow = [way for way, (_, beta) in links.items() if beta > limit]
    yield from _slow(links, slow, usual)
    far = [(way, alpha) for way, (alpha, _) in links.items() if alpha > FAR]
    for (a, b), alpha in far:
        what = f"a message from {named(a)} to {named(b)} takes {human_seconds(alpha)} at least."
        remedy = "Choose hosts of one network, and algorithms of few rounds."
        yield warning("links.far", what, remedy, a, b)
    if not slow and not far:
        (worst, _), (_, least) = max(links.values()), max(links.values(), key=lambda x: x[1])
        carry = f"at least {human_bytes(1 / least)}/s"
        yield fine("links", f"messages take at most {human_seconds(worst)}, links carry {carry}")


def _slow(
    links: dict[tuple[str, str], tuple[float, float]], slow: list[tuple[str, str]], usual: float
) -> Iterator[Check]:
    """Slow links; those of one machine are told together."""
    for host, theirs in _culprits(slow).items():
        beta = max(links[way][1] for way in theirs)
        others = list(dict.fromkeys(a if b == host else b for a, b in theirs))
        compare = f", others at {human_bytes(1 / usual)}/s" if beta > SLOWER * usual > 0 else ""
        yield warning(
            "links.slow",
            f"messages between {host} and {named(*others)} pass at {human_bytes(1 / beta)}/s"
            f"{compare}: 100 MB of gradients take {human_seconds(GRADIENTS * beta)}.",
            f"Look at the cable, the switch port and the speed of {host} (ethtool); until then "
            "send little there.",
            host,
            *others,
        )


def _culprits(slow: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The fewest machines that explain all slow ways, greedily."""
    left, found = slow, {}
    while left:
        host = Counter(h for way in left for h in way if h != HERE).most_common(1)[0][0]
        found[host] = [way for way in left if host in way]
        left = [way for way in left if host not in way]
    return found
