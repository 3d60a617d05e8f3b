"""A storm over a real run: seeded faults for minutes, and a report of what they cost.

    make storm                            # ten minutes of storm beside a run without faults; storm-out/storm.md
    python -m benchmarks.storm --help

``plan`` draws the faults; ``network`` and ``programs`` are the stage; ``fleet`` the run; ``faults`` strike and prove
that they did; ``timeline`` is what was seen, ``figures`` what follows from it; ``report`` and ``picture`` show it;
``churn`` is the run of joins and leaves.
"""
