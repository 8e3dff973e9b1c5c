! mpi FILE: the case of tests/c/case.h over a communicator of half the ranks of the job, twice over
! one endpoint. Rank 0 of the first half writes the results of the second plan to FILE. With
! -DUSE_F08 by the module mpi_f08, else by mpi.
! mpi FILE cache: decoding over that communicator.
program over_mpi
#ifdef USE_F08
  use mpi_f08
#else
  use mpi
#endif
  use case_of_tests
  implicit none
#ifdef USE_F08
  type(MPI_Comm) :: half
#else
  integer :: half
#endif
  integer :: world_rank, rank, provided, error
  character(len=1000) :: path
  type(annulus_options) :: options
  type(c_ptr) :: attention, endpoint, none, plan, second
  real(c_float), dimension(value_dim, q_heads, length, batch) :: out, all_out
  real(c_float), dimension(length, q_heads, batch) :: lse, all_lse
  real(c_float), dimension(head_dim, q_heads, length, batch) :: dq, all_dq
  real(c_float), dimension(head_dim, kv_heads, length, batch) :: dk, all_dk
  real(c_float), dimension(value_dim, kv_heads, length, batch) :: dv, all_dv

  call get_command_argument(1, path)
  call MPI_Init_thread(MPI_THREAD_FUNNELED, provided, error)
  call MPI_Comm_rank(MPI_COMM_WORLD, world_rank, error)
  call MPI_Comm_split(MPI_COMM_WORLD, mod(world_rank, 2), world_rank, half, error)
  call MPI_Comm_rank(half, rank, error)
  if (command_argument_count() == 2) then
    call decode_over_half()
    call MPI_Finalize(error)
    stop
  end if
  options = options_of_case()
  call ok(annulus_attention_create(options, attention))
#ifdef USE_F08
  call ok(annulus_plan_create_mpi(attention, half%MPI_VAL, plan))
  call ok(annulus_plan_destroy(plan))
  call ok(annulus_endpoint_create_mpi(attention, half%MPI_VAL, endpoint))
#else
  call ok(annulus_plan_create_mpi(attention, half, plan))
  call ok(annulus_plan_destroy(plan))
  call ok(annulus_endpoint_create_mpi(attention, half, endpoint))
#endif
  call ok(annulus_plan_create_endpoint(attention, endpoint, plan))
  call ok(annulus_plan_create_endpoint(attention, endpoint, second))
  call ok(annulus_endpoint_destroy(endpoint))
  call check(annulus_plan_create_endpoint(attention, endpoint, none) == &
      ANNULUS_INVALID_ARGUMENT, 'an endpoint that was destroyed')
  call ok(annulus_attention_destroy(attention))
  ! rows of other ranks are 0: the bits of all, or-ed, are the whole
  out = 0; lse = 0; dq = 0; dk = 0; dv = 0
  call run(plan, out, lse, dq, dk, dv)
  call ok(annulus_plan_destroy(plan))
  out = 0; lse = 0; dq = 0; dk = 0; dv = 0
  call run(second, out, lse, dq, dk, dv)
  call collect(out, all_out, size(out))
  call collect(lse, all_lse, size(lse))
  call collect(dq, all_dq, size(dq))
  call collect(dk, all_dk, size(dk))
  call collect(dv, all_dv, size(dv))
  if (world_rank == 0) call write_results(trim(path), all_out, all_lse, all_dq, all_dk, all_dv)
  call ok(annulus_plan_destroy(second))
  call MPI_Finalize(error)

contains

  subroutine decode_over_half()
    integer :: ranks, unit
    integer(c_int64_t) :: own, number
    type(c_ptr) :: decoder
    call MPI_Comm_size(half, ranks, error)
    options = options_of_cache()
    call ok(annulus_attention_create(options, attention))
#ifdef USE_F08
    call ok(annulus_cache_create_mpi(attention, half%MPI_VAL, decoder))
#else
    call ok(annulus_cache_create_mpi(attention, half, decoder))
#endif
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
  end subroutine decode_over_half

  subroutine collect(own, whole, count)
    integer, intent(in) :: count
    real(c_float), intent(in) :: own(count)
    real(c_float), intent(out) :: whole(count)
    integer :: bits(count), all_bits(count)
    bits = transfer(own, bits)
    call MPI_Reduce(bits, all_bits, count, MPI_INTEGER, MPI_BOR, 0, half, error)
    whole = transfer(all_bits, whole)
  end subroutine collect
end program over_mpi
