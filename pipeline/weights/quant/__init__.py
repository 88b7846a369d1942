"""Quantized weights as msmodelslim writes them: made by a stream, checked against what 310P loads, repaired."""
