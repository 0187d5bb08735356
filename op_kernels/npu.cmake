# Target npu: the kernels, built by CANN in its direct-launch style, with host functions and bindings
# in one library, libascend_kv_npu.so, for torch.ops.load_library. On x86 and on aarch64.
#
# cmake -S op_kernels -B build -DASCEND_KV_NPU=ON -DASCEND_KV_TWIN=OFF -DSOC_VERSION=Ascend910B3
#     -DTORCH_DIR=.../site-packages/torch -DTORCH_NPU_DIR=.../site-packages/torch_npu
# cmake --build build --target npu
set(ASCEND_HOME_PATH "$ENV{ASCEND_HOME_PATH}" CACHE PATH "CANN, as its set_env.sh says")
set(SOC_VERSION "" CACHE STRING "The chip: Ascend910B1 to Ascend910B4")
set(TORCH_DIR "" CACHE PATH "The folder of the package torch")
set(TORCH_NPU_DIR "" CACHE PATH "The folder of the package torch_npu")
foreach(variable ASCEND_HOME_PATH SOC_VERSION TORCH_DIR TORCH_NPU_DIR)
    if(NOT ${variable})
        message(FATAL_ERROR "${variable} is not set: give -D${variable}=... (see npu.cmake)")
    endif()
endforeach()

set(CANN_HERE ${ASCEND_HOME_PATH}/${CMAKE_SYSTEM_PROCESSOR}-linux)  # x86_64-linux, aarch64-linux
find_path(ASCENDC_CMAKE_DIR ascendc.cmake NO_DEFAULT_PATH
    PATHS ${ASCEND_HOME_PATH} ${CANN_HERE}
    PATH_SUFFIXES tools/tikcpp/ascendc_kernel_cmake compiler/tikcpp/ascendc_kernel_cmake
        tikcpp/ascendc_kernel_cmake ascendc_devkit/tikcpp/samples/cmake)
find_path(CANN_TILING_DIR tiling/platform/platform_ascendc.h NO_DEFAULT_PATH
    PATHS ${ASCEND_HOME_PATH} ${CANN_HERE}
    PATH_SUFFIXES include asc/include asc/include/utils include/utils)
foreach(found ASCENDC_CMAKE_DIR CANN_TILING_DIR)
    if(NOT ${found})
        message(FATAL_ERROR "${ASCEND_HOME_PATH} is not a whole CANN toolkit: no ${found}")
    endif()
endforeach()

set(ASCEND_CANN_PACKAGE_PATH ${ASCEND_HOME_PATH})
include(${ASCENDC_CMAKE_DIR}/ascendc.cmake)

# Also writes aclrtlaunch_<kernel>.h, where the target's users find it.
ascendc_library(ascend_kv_kernels STATIC ${KERNEL_SOURCES})

file(GLOB HOST_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*/*_host.cpp)
add_library(npu SHARED bindings_npu.cpp ${HOST_SOURCES})
set_target_properties(npu PROPERTIES OUTPUT_NAME ascend_kv_npu
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
target_compile_options(npu PRIVATE -O2 -Wall -D_GLIBCXX_USE_CXX11_ABI=1)
target_include_directories(npu SYSTEM PRIVATE
    ${TORCH_NPU_DIR}/include
    ${TORCH_NPU_DIR}/include/third_party/acl/inc
    ${TORCH_DIR}/include
    ${TORCH_DIR}/include/torch/csrc/api/include
    ${CANN_TILING_DIR})
target_link_directories(npu PRIVATE ${TORCH_DIR}/lib ${TORCH_NPU_DIR}/lib
    ${ASCEND_HOME_PATH}/lib64)
target_link_libraries(npu PRIVATE ascend_kv_kernels torch_npu torch torch_cpu c10 ascendcl
    tiling_api register platform dl)
