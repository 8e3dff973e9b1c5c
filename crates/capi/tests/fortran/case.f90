! The case of tests/c/case.h for the Fortran programs.
module case_of_tests
  use, intrinsic :: iso_c_binding
  use annulus
  implicit none
  integer, parameter :: batch = 2, length = 37, q_heads = 4, kv_heads = 2, head_dim = 8, value_dim = 6

contains

  ! Ends the program with status 1 if a call failed.
  subroutine ok(status)
    integer(c_int), intent(in) :: status
    if (status /= ANNULUS_SUCCESS) then
      write (*, *) annulus_error_text(status), ': ', annulus_message()
      error stop 1
    end if
  end subroutine ok

  subroutine check(holds, what)
    logical, intent(in) :: holds
    character(len=*), intent(in) :: what
    if (.not. holds) then
      write (*, *) what, ' does not hold; last error: ', annulus_message()
      error stop 1
    end if
  end subroutine check

  function options_of_case() result(options)
    type(annulus_options) :: options
    call ok(annulus_options_default(options))
    options%batch = batch
    options%q_len = length
    options%kv_len = length
    options%q_heads = q_heads
    options%kv_heads = kv_heads
    options%head_dim = head_dim
    options%value_dim = value_dim
    options%causal = 1
  end function options_of_case

  pure function value(salt, b, row, head, c) result(number)
    integer, intent(in) :: salt, b, head, c
    integer(c_int64_t), intent(in) :: row
    real(c_float) :: number
    number = real(mod(row*31 + head*7 + c*3 + b*5 + salt*11, 17_c_int64_t) - 8, c_float)/8.0
  end function value

  function numbers(salt, rows, heads, dim) result(all)
    integer, intent(in) :: salt, heads, dim
    integer(c_int64_t), intent(in) :: rows(:)
    real(c_float), allocatable :: all(:, :, :, :)
    integer :: b, i, head, c
    allocate (all(dim, heads, size(rows), batch))
    do b = 1, batch
      do i = 1, size(rows)
        do head = 1, heads
          do c = 1, dim
            all(c, head, i, b) = value(salt, b - 1, rows(i), head - 1, c - 1)
          end do
        end do
      end do
    end do
  end function numbers

  ! Runs both passes over the rows of a plan, and puts their results to their places. Rows of the
  ! plan count from row `first` of the case, by default 0.
  subroutine run(plan, out, lse, dq, dk, dv, first)
    type(c_ptr), intent(in) :: plan
    integer(c_int64_t), intent(in), optional :: first
    real(c_float), intent(inout) :: out(:, :, :, :), lse(:, :, :)
    real(c_float), intent(inout) :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :)
    integer(c_int64_t), allocatable :: rows(:), keys(:)
    real(c_float), allocatable :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :), dout(:, :, :, :)
    real(c_float), allocatable, dimension(:, :, :) :: dlse, own_lse, own_max, own_sum
    real(c_float), allocatable, dimension(:, :, :, :) :: own_out, own_dq, own_dk, own_dv
    integer :: b, i, head, row
    call ok(annulus_plan_q_rows(plan, rows))
    call ok(annulus_plan_kv_rows(plan, keys))
    call check(size(rows) == size(keys) .and. all(rows == keys), 'rows')
    if (present(first)) rows = rows + first
    q = numbers(1, rows, q_heads, head_dim)
    k = numbers(2, rows, kv_heads, head_dim)
    v = numbers(3, rows, kv_heads, value_dim)
    dout = numbers(4, rows, q_heads, value_dim)
    allocate (dlse(size(rows), q_heads, batch))
    allocate (own_lse, own_max, own_sum, mold=dlse)
    do b = 1, batch
      do head = 1, q_heads
        do i = 1, size(rows)
          dlse(i, head, b) = value(5, b - 1, rows(i), head - 1, 0)
        end do
      end do
    end do
    allocate (own_out, mold=dout)
    allocate (own_dq, mold=q)
    allocate (own_dk, mold=k)
    allocate (own_dv, mold=v)
    call ok(annulus_forward(plan, q, k, v, own_out, own_lse, max=own_max, sum=own_sum))
    call ok(annulus_backward(plan, q, k, v, own_out, own_lse, dout, own_dq, own_dk, own_dv, dlse, &
                             max=own_max, sum=own_sum))
    do i = 1, size(rows)
      row = int(rows(i)) + 1
      out(:, :, row, :) = own_out(:, :, i, :)
      lse(row, :, :) = own_lse(i, :, :)
      dq(:, :, row, :) = own_dq(:, :, i, :)
      dk(:, :, row, :) = own_dk(:, :, i, :)
      dv(:, :, row, :) = own_dv(:, :, i, :)
    end do
  end subroutine run

  subroutine write_results(path, out, lse, dq, dk, dv)
    character(len=*), intent(in) :: path
    real(c_float), intent(in) :: out(:, :, :, :), lse(:, :, :)
    real(c_float), intent(in) :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :)
    integer :: unit
    open (newunit=unit, file=path, access='stream', form='unformatted', status='replace')
    write (unit) out, lse, dq, dk, dv
    close (unit)
  end subroutine write_results

  function options_of_cache() result(options)
    type(annulus_options) :: options
    options = options_of_case()
    options%q_len = 0
    options%kv_len = 0
    options%page_rows = 4
  end function options_of_cache

  ! Appends the rows first to last, which count from 0, and attends with their queries.
  subroutine decode_rows(decoder, first, last, own, out, lse)
    type(c_ptr), intent(in) :: decoder
    integer(c_int64_t), intent(in) :: first, last
    logical, intent(in) :: own
    real(c_float), intent(inout) :: out(:, :, :, :), lse(:, :, :)
    integer(c_int64_t), allocatable :: mine(:)
    integer(c_int64_t) :: i, rows(last - first + 1)
    rows = [(i, i=first, last)]
    if (own) then
      call ok(annulus_cache_own_rows(decoder, last - first + 1, mine))
      mine = mine + first
      call ok(annulus_cache_append_own(decoder, last - first + 1, &
                                       numbers(2, mine, kv_heads, head_dim), &
                                       numbers(3, mine, kv_heads, value_dim)))
    else
      call ok(annulus_cache_append(decoder, numbers(2, rows, kv_heads, head_dim), &
                                   numbers(3, rows, kv_heads, value_dim)))
    end if
    call ok(annulus_cache_len(decoder, i))
    call check(i == last + 1, 'length')
    call ok(annulus_cache_attend(decoder, numbers(1, rows, q_heads, head_dim), &
                                 out(:, :, first + 1:last + 1, :), lse(first + 1:last + 1, :, :)))
  end subroutine decode_rows

  ! Decoding as tests/c/case.h does it: a prefill in two chunks, then tokens one by one.
  subroutine decode(decoder, out, lse)
    type(c_ptr), intent(in) :: decoder
    real(c_float), intent(inout) :: out(:, :, :, :), lse(:, :, :)
    integer(c_int64_t) :: row
    call decode_rows(decoder, 0_c_int64_t, 19_c_int64_t, .false., out, lse)
    call decode_rows(decoder, 20_c_int64_t, 23_c_int64_t, .true., out, lse)
    do row = 24, length - 1
      call decode_rows(decoder, row, row, .false., out, lse)
    end do
  end subroutine decode

end module case_of_tests
