#!/bin/sh
# Process 1 of the QEMU guest, in its initramfs: load the modules, mount the host's / (9p, read-only) under a tmpfs
# overlay, go on there with the control folder's main.sh. busybox sh; speaks to the kernel log, which is the console.
export PATH=/bin
say() { echo "lab: $*" >/dev/kmsg; }
die() {
    say "$*"
    poweroff -f
}
mount_9p() { # OPTIONS TAG FOLDER
    mount -t 9p -o "$1,trans=virtio,version=9p2000.L,msize=524288,access=client" "$2" "$3"
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module options; do
    insmod "/lib/$module" $options || say "insmod $module failed"
done </modules.order

attempts=0
until mount_9p ro,cache=loose hostroot /host; do # the virtio device may appear a moment later
    attempts=$((attempts + 1))
    [ $attempts -lt 50 ] || die "cannot mount the host's root"
    sleep 0.1
done
mount_9p rw,cache=none control /control || die "cannot mount the control folder"

mount -t tmpfs -o size=75%,mode=755 tmpfs /rw
mkdir -p /rw/upper /rw/work
mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work overlay /newroot || die "no overlay"
cd /newroot || die "no root"
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts -o ptmxmode=666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
ln -sf /proc/self/fd dev/fd
ln -sf /proc/self/fd/0 dev/stdin
ln -sf /proc/self/fd/1 dev/stdout
ln -sf /proc/self/fd/2 dev/stderr
mkdir -p run/lab
mount --move /control run/lab
umount /sys
umount /proc
exec switch_root /newroot /bin/bash /run/lab/main.sh
