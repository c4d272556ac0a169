#!/usr/bin/env bash
# Make the QEMU guest: Debian's own kernel, unmodified, and an initramfs with the modules that the lab needs.
#
#   build-guest.sh [KERNEL_PACKAGE]    the newest 6.12 image that apt offers, else Debian's 6.1
#
# Writes {vmlinux,initramfs.cpio,modules} into build/lab/guest/KERNEL_VERSION, or below $LAB_BUILD. Downloads the
# package and does not install it: neither root nor a change to the host. A guest newer than these scripts is kept.
set -Eeuo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${LAB_BUILD:-$here/../../build/lab}
trap 'echo "lab: build-guest.sh failed in line $LINENO: $BASH_COMMAND" >&2' ERR
export PATH=$PATH:/usr/sbin:/sbin # depmod, modprobe

# 9p and virtio carry the host's files and the output; the rest is what the topologies are made of.
modules_wanted=(virtio_pci virtio_console virtio_rng 9pnet_virtio 9p overlay veth dummy 8021q sch_netem sch_tbf
    ib_uverbs rdma_ucm rdma_rxe)

choose_kernel() { # the cloud and rt flavours are left out: the cloud kernel has no rdma_rxe
    local newest
    newest=$(apt-cache search --names-only '^linux-image-6\.12\.[0-9]+.*-amd64$' | awk '{ print $1 }' |
        grep -Ev -- '-(cloud|rt)-|-unsigned$' | sort -V | tail -n 1) || true
    [[ -n $newest ]] || newest=$(apt-cache depends linux-image-amd64 2>/dev/null |
        awk '/Depends: linux-image-/ { print $2; exit }') || true
    [[ -n $newest ]] || { echo "lab: apt offers no kernel image; run apt-get update" >&2; return 1; }
    echo "$newest"
}

unpack_kernel() { # PACKAGE: sets `kernel`, the folder it was unpacked to, and `version`
    local package=$1
    kernel=$root/kernels/$package
    if [[ ! -d $kernel ]]; then
        mkdir -p "$root/debs" "$root/kernels"
        (cd "$root/debs" && apt-get -q=2 -o APT::Sandbox::User=root download "$package") # _apt cannot write here
        rm -rf "$kernel.part"
        dpkg -x "$root/debs/${package}"_*.deb "$kernel.part"
        rm -f "$root/debs/${package}"_*.deb
        mv "$kernel.part" "$kernel"
    fi
    version=$(basename "$kernel"/lib/modules/*)
    [[ -s $kernel/lib/modules/$version/modules.dep ]] || depmod -b "$kernel" "$version"
}

unpack_module() { # COMPRESSED FILE
    case $1 in
    *.xz) xz -dc "$1" >"$2" ;;
    *.zst) zstd -dcq "$1" >"$2" ;;
    *) cp "$1" "$2" ;;
    esac
}

collect_modules() { # INITRAMFS_ROOT: lib/*.ko and modules.order, in the order in which they can be loaded
    local target=$1 module kind path options name
    local -A seen=()
    : >"$target/modules.order"
    for module in "${modules_wanted[@]}"; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module" >"$target/depends" 2>/dev/null ||
            { echo "lab: kernel $version has no module $module" >&2; return 1; }
        while read -r kind path options; do
            [[ $kind == insmod && -z ${seen[$path]:-} ]] || continue
            seen[$path]=1
            name=$(basename "$path")
            name=${name%.xz} name=${name%.zst}
            unpack_module "$path" "$target/lib/$name"
            [[ $name != dummy.ko ]] || options=numdummies=0
            echo "$name $options" >>"$target/modules.order"
        done <"$target/depends"
    done
    rm "$target/depends"
}

build_initramfs() { # OUTPUT
    local files name
    files=$(mktemp -d)
    mkdir -p "$files"/{bin,proc,sys,dev,lib,host,rw,newroot,control}
    cp /bin/busybox "$files/bin/busybox"
    for name in sh mount umount mkdir insmod switch_root cat echo poweroff sleep ln; do
        ln -s busybox "$files/bin/$name"
    done
    collect_modules "$files"
    install -m 755 "$here/guest-init.sh" "$files/init"
    (cd "$files" && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet) >"$1"
    rm -rf "$files"
}

is_fresh() { # GUEST
    local script
    [[ -s $1/initramfs.cpio ]] || return 1
    for script in build-guest.sh guest-init.sh extract-vmlinux.py; do
        [[ $1/initramfs.cpio -nt $here/$script ]] || return 1
    done
}

if (($# == 0)); then
    for guest in "$root"/guest/*; do
        if is_fresh "$guest"; then exit 0; fi
    done
fi
if ((EUID == 0)) && ! choose_kernel >/dev/null 2>&1; then apt-get update -qq; fi # a machine whose lists were removed
package=${1:-$(choose_kernel)}
echo "lab: building the guest from $package"
unpack_kernel "$package"
guest=$root/guest/$version
mkdir -p "$guest"
# An uncompressed ELF kernel: QEMU boots it through its PVH note, and nothing is unpacked at the emulator's pace.
python3 "$here/extract-vmlinux.py" "$kernel/boot/vmlinuz-$version" "$guest/vmlinux"
ln -sfn "$(realpath "$kernel/lib/modules/$version")" "$guest/modules"
build_initramfs "$guest/initramfs.part"
mv "$guest/initramfs.part" "$guest/initramfs.cpio"
