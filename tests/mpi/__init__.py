"""Worlds that the mpirun of Open MPI, MPICH and Intel MPI start: `nox -s mpi`."""
