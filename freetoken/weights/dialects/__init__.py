"""Ways in which publishers' tools store coded weights: a file is a dialect, `DIALECT` its one table.

A dialect names roles and unpacks codes; what codes mean is a format's business (quant/).
"""
