! cache RANKS FILE MACHINE: decoding with an in-process KV cache as tests/c/cache.c does it; the
! results go to FILE. A plan takes the strategy of the least time on MACHINE.
program cache
  use case_of_tests
  implicit none
  character(len=1000) :: ranks_text, path, machine
  integer(c_int64_t) :: ranks, count
  real(c_float) :: out(value_dim, q_heads, length, batch), lse(length, q_heads, batch)
  real(c_float) :: again(value_dim, q_heads, length, batch), again_lse(length, q_heads, batch)
  real(c_double) :: out64(value_dim, q_heads, length, batch), lse64(length, q_heads, batch)
  real(c_double) :: sinks(2, 1)
  type(annulus_options) :: options
  type(c_ptr) :: attention, decoder
  integer :: unit

  call get_command_argument(1, ranks_text)
  call get_command_argument(2, path)
  call get_command_argument(3, machine)
  read (ranks_text, *) ranks
  options = options_of_cache()
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_cache_create_threads(attention, ranks, decoder))
  call ok(annulus_attention_destroy(attention))
  call ok(annulus_cache_ranks(decoder, count))
  call check(count == ranks, 'ranks')
  call ok(annulus_cache_rank(decoder, count))
  call check(count == 0, 'rank')
  call ok(annulus_cache_page_rows(decoder, count))
  call check(count == 4, 'rows of a page')
  call decode(decoder, out, lse)
  call ok(annulus_cache_local_len(decoder, count))
  call check(count == length, 'local rows')
  call ok(annulus_cache_predicted_bytes(decoder, 1_c_int64_t, count))
  call check(count == ranks*(ranks - 1)*batch*q_heads*(value_dim + 2)*4, 'predicted bytes')
  call ok(annulus_cache_buffer_bytes(decoder, count))
  call check(count >= length*batch*kv_heads*(head_dim + value_dim)*4, 'bytes of buffers')

  ! bad arguments are named, and change nothing
  call check(annulus_cache_truncate(decoder, length + 1_c_int64_t) == ANNULUS_INVALID_ARGUMENT, &
             'truncate beyond the length')
  call check(index(annulus_message(), 'len: got 38, want at most the 37') == 1, 'named length')
  call check(annulus_cache_append(decoder, out, out) == ANNULUS_INVALID_ARGUMENT, 'a wrong shape')
  call check(index(annulus_message(), 'k: got') == 1, 'named tensor')
  call ok(annulus_cache_truncate(decoder, 0_c_int64_t))
  call decode(decoder, again, again_lse)
  call check(all(again == out) .and. all(again_lse == lse), 'the same bits again')
  call ok(annulus_cache_destroy(decoder))
  call check(annulus_cache_destroy(decoder) == ANNULUS_INVALID_ARGUMENT, 'double destroy')

  ! double precision, with sinks
  options%dtype = ANNULUS_F64
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_cache_create_threads(attention, ranks, decoder))
  call ok(annulus_attention_destroy(attention))
  call decode64(decoder, out64, lse64)
  call check(maxval(abs(out64 - out)) < 1e-5 .and. any(out64 /= out), 'double precision')
  call ok(annulus_cache_destroy(decoder))
  options%sinks = 2
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_cache_create_threads(attention, ranks, decoder))
  call ok(annulus_attention_destroy(attention))
  sinks = 0.5
  call decode64(decoder, out64, lse64, sinks)
  call check(all(lse64 > lse), 'sinks')
  call ok(annulus_cache_destroy(decoder))

  call plan_by_machine(trim(machine))
  open (newunit=unit, file=trim(path), access='stream', form='unformatted', status='replace')
  write (unit) out, lse
  close (unit)

contains

  ! A prefill of 30 rows, then tokens.
  subroutine decode64(decoder, out, lse, sinks)
    type(c_ptr), intent(in) :: decoder
    real(c_double), intent(inout) :: out(:, :, :, :), lse(:, :, :)
    real(c_double), intent(in), optional :: sinks(:, :)
    integer(c_int64_t) :: first, last, i
    integer(c_int64_t), allocatable :: rows(:)
    first = 0
    do while (first < length)
      last = max(first, 29_c_int64_t)
      allocate (rows(last - first + 1))
      rows = [(i, i=first, last)]
      call ok(annulus_cache_append(decoder, real(numbers(2, rows, kv_heads, head_dim), c_double), &
                                   real(numbers(3, rows, kv_heads, value_dim), c_double)))
      call ok(annulus_cache_attend(decoder, real(numbers(1, rows, q_heads, head_dim), c_double), &
                                   out(:, :, first + 1:last + 1, :), &
                                   lse(first + 1:last + 1, :, :), sinks))
      deallocate (rows)
      first = last + 1
    end do
  end subroutine decode64

  ! Two nodes of two ranks with a slow network: the ranks of a node divide the keys.
  subroutine plan_by_machine(machine)
    character(len=*), intent(in) :: machine
    type(annulus_options) :: options
    type(c_ptr) :: attention, plan
    integer(c_int32_t) :: strategy, heads, queries, keys
    options = options_of_case()
    options%strategy = ANNULUS_STRATEGY_AUTO
    options%batch = 1
    options%q_len = 64
    options%kv_len = 64
    options%kv_heads = 1
    options%value_dim = head_dim
    options%causal = 0
    call ok(annulus_attention_create(options, attention))
    call check(annulus_attention_set_machine(attention, 'none.json') == ANNULUS_IO, 'no file')
    call check(index(annulus_message(), 'none.json: ') == 1, 'named file')
    call ok(annulus_attention_set_machine(attention, machine))
    call ok(annulus_plan_create_threads(attention, 4_c_int64_t, plan))
    call ok(annulus_plan_strategy(plan, strategy, heads))
    call ok(annulus_plan_grid(plan, queries, keys))
    call check(strategy == ANNULUS_STRATEGY_GRID .and. heads == 1, 'strategy by machine')
    call check(queries == 2 .and. keys == 2, 'grid by machine')
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
  end subroutine plan_by_machine
end program cache
