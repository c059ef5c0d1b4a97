"""Show rows of the operator race: lines as they come, and bars at the end."""

COLUMNS = ("pass", "peer", "gpu_us", "wall_us", "floor_over_time", "peak_mib", "launches", "error")


def print_rows(rows):
    """Print one pass of a case, a line a peer."""
    for row in sorted(rows, key=lambda row: float(row["gpu_us"])):
        cells = [f"{str(row[column]):>9}" for column in COLUMNS]
        marks = "" if row["timed"] != "events" else " events"
        marks += " differs from run to run" if row["bit_equal"] is False else ""
        print("  " + " ".join(cells) + marks, flush=True)


def plot(rows, path):
    """Draw floor / time of the longest pass of every case, a bar a peer, where matplotlib is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    cases = {}
    for row in rows:
        passes = cases.setdefault(f"{row['op']} {row['shape']}", {})
        passes.setdefault(row["pass"], {})[row["peer"]] = float(row["floor_over_time"])
    bars = {
        name: passes.get("full") or next(iter(passes.values())) for name, passes in cases.items()
    }
    peers = sorted({peer for shares in bars.values() for peer in shares})
    figure = Figure(figsize=(9, 1 + 0.22 * sum(len(shares) + 1 for shares in bars.values())))
    axes = figure.add_subplot()
    position, ticks = 0, []
    for name, shares in bars.items():
        ticks.append((position + (len(shares) - 1) / 2, name))
        for peer, share in sorted(shares.items(), key=lambda item: item[1]):
            axes.barh(position, share, color=f"C{peers.index(peer)}")
            axes.text(share, position, f" {peer}", va="center", fontsize=7)
            position += 1
        position += 1
    axes.set_yticks([tick for tick, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("floor / time: 1 is the speed of the memory or of the matrix unit")
    figure.savefig(path, dpi=130, bbox_inches="tight")
