"""The control plane: who is in the run, who gives state to whom, what a boundary decided. gRPC, no torch.

Pure: ``membership``, ``matching``, ``boundary_vote``, ``orders``, composed by ``run``; ``history`` stores it. The shell
round them: ``owner``, ``service``, ``server``, ``rendezvous``. The other ends: ``client`` and ``peer_service`` in a
worker, ``operator_client`` in the command line.
"""
