"""The conformance test of optimizers and storages, and the processes in which tests run.

``pool``, ``worker`` and ``scene`` know no optimizer, so whoever changes how ranks run reads no
other room; whoever adds a case to ``conformance`` reads ``wrappers``.
"""
