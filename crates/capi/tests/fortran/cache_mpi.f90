! cache_mpi FILE: decoding over a communicator of half the ranks of the job. Rank 0 of the first
! half writes the results to FILE.
program cache_mpi
  use mpi
  use case_of_tests
  implicit none
  integer :: half, world_rank, ranks, provided, unit, error
  integer(c_int64_t) :: own, number
  character(len=1000) :: path
  type(annulus_options) :: options
  type(c_ptr) :: attention, decoder
  real(c_float) :: out(value_dim, q_heads, length, batch), lse(length, q_heads, batch)

  call get_command_argument(1, path)
  call MPI_Init_thread(MPI_THREAD_FUNNELED, provided, error)
  call MPI_Comm_rank(MPI_COMM_WORLD, world_rank, error)
  call MPI_Comm_split(MPI_COMM_WORLD, mod(world_rank, 2), world_rank, half, error)
  call MPI_Comm_size(half, ranks, error)
  options = options_of_cache()
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_cache_create_mpi(attention, half, decoder))
  call ok(annulus_attention_destroy(attention))
  call ok(annulus_cache_ranks(decoder, number))
  call check(number == ranks, 'ranks')
  call decode(decoder, out, lse)
  call ok(annulus_cache_local_len(decoder, own))
  call check(ranks == 1 .or. own < length, 'rows of this rank')
  if (world_rank == 0) then
    open (newunit=unit, file=trim(path), access='stream', form='unformatted', status='replace')
    write (unit) out, lse
    close (unit)
  end if
  call ok(annulus_cache_destroy(decoder))
  call MPI_Finalize(error)
end program cache_mpi
