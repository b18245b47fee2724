"""What other serving engines are known to do: their limits, their hosts, their kernels. Data with sources; no torch.

`engines` reads the table, `weights` prices products with weights of few bits, `measured_steps` stands for steps where no device is known.
"""
