"""Which chunks a load needs, a save keeps and a lookup finds, per kind of group.

Pure functions over resolved numbers (`rules.Rules`): no vLLM, no input or output. Every answer
equals that of vLLM 0.32's own managers; tests/property/test_masks_against_vllm.py is the proof.
"""
